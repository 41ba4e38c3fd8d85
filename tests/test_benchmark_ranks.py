"""benchmarks.ranks: each part has processes of its own, and what they do not hold is told."""

import pytest
from commands import command, last_line

from benchmarks import ranks

FAKE_RANK = """
import sys, time
part, rank = sys.argv[1], int(sys.argv[5])
if part == "soak":
    sys.exit("a page is missing")
if part == "text":
    print("compiled")
    print('{"layers": 3}')
if part == "fault":
    sys.exit("all ranks stop at step 32: rank 1 has health word 0x1")
if part == "kill":
    print("steps are run")
    time.sleep(60 if rank + 1 == int(sys.argv[2]) else 3)
    sys.exit("rank 1 ended")
"""


@pytest.fixture
def fake_rank(monkeypatch, tmp_path):
    """A process that only says what one of a part would."""
    path = tmp_path / "parts.py"
    path.write_text(FAKE_RANK)
    monkeypatch.setattr(ranks, "CHILD", path)
    return path


def test_a_part_of_several_ranks_costs_the_others_nothing(monkeypatch, capsys, fake_rank):
    assert command(monkeypatch, ranks, "--tp", "4") == 1
    rows, record = last_line(capsys)
    assert record["failed"] == ["soak"]
    assert record["text"] == {"layers": 3}
    assert record["fault"] == {"stop": "all ranks stop at step 32: rank 1 has health word 0x1"}
    assert record["kill"]["statuses"] == [1, 1, 1, -9]
    assert record["kill"]["ends"] == [["rank 1 ended"]] * 3
    assert rows[-4:-2] == ["---- soak: process 0 said at last", "a page is missing"]


@pytest.mark.parametrize(
    ("part", "old", "new", "said"),
    [
        ("fault", "32: rank 1", '" + str(rank) + "', "exit statuses [1, 1]"),
        ("fault", "sys.exit(", "print(", "exit statuses [0, 0]"),
        ("kill", "sys.exit(", "0 and (", "exit statuses [0, -9]"),
        ("text", FAKE_RANK, "import time; time.sleep(60)", "out of time until all ended"),
    ],
)
def test_ranks_that_do_not_hold_are_told(monkeypatch, capsys, fake_rank, part, old, new, said):
    fake_rank.write_text(FAKE_RANK.replace(old, new))
    seconds = "1" if part == "text" else "60"
    assert command(monkeypatch, ranks, "--part", part, "--seconds", seconds) == 1
    rows, record = last_line(capsys)
    assert record["failed"] == [part]
    assert said in rows[-1]


@pytest.mark.slow
def test_ranks_on_a_cpu(monkeypatch, capsys):
    """Really: minutes of compiling."""
    assert command(monkeypatch, ranks, "--steps", "300", "--seconds", "600") == 0
    _, record = last_line(capsys)
    assert record["fault"]["stop"].startswith("all ranks stop at step 32: rank 1 has health word")
