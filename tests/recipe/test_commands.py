"""The commands that judge a run: they write what they know at once, and refuse before the work."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.recipe import curves, evaluate, ranks
from checkpoints.recipe.arrays import Split
from checkpoints.recipe.saved import Log, read_log

TINY = Path(__file__).parents[2] / "checkpoints" / "k3-tiny"


@pytest.fixture
def data(tmp_path):
    """Held-out text of k3-tiny's bytes, and what prepare would tell of it."""
    text = np.frombuffer(b"def f(x):\n    return x + 1\n" * 3, np.uint8).tolist()
    for name in ("code", "chat"):
        Split.of([(text, [True] * len(text), len(text))] * 2).save(tmp_path / f"{name}_held.npz")
    meta = {"rank_file_sha256": ranks.digest(TINY), "xz_bits_per_byte": 2.0}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    return tmp_path


def command(data, *more):
    results = data / "new" / "results.json"
    return ["--model", str(TINY), "--data", str(data), "--results", str(results), *more]


def test_text_is_judged(data, capsys):
    (data / "final.json").write_text('{"code": {"nll": 100.0, "count": 10.0}}')
    (data / "run.json").write_text('{"dtype": "bfloat16"}')
    assert evaluate.main(command(data, "--run", str(data), "--parts", "text")) == 0
    found = json.loads((data / "new" / "results.json").read_text())["text"]
    assert 4 < found["bits_per_byte"] < 12
    assert found["code"]["trained"] == 10.0
    assert "trained" not in found["chat"]
    assert np.shape(found["loads"])[1] == 16
    assert "| Held-out code, bits a byte (xz -9e: 2.000) | <= 1.500 |" in capsys.readouterr().out


def test_numbers_are_kept_as_they_come_and_parts_add_up(data, monkeypatch):
    def fails(evaluation):
        yield {"float32": {"same": 1, "compared": 1, "partings": []}}
        raise RuntimeError("the machine went away")

    speed = {"dtype": "float32"}
    monkeypatch.setitem(evaluate.PARTS, "speed", lambda _: iter([{"A card": speed}]))
    monkeypatch.setitem(evaluate.PARTS, "agree", fails)
    with pytest.raises(RuntimeError, match="went away"):
        evaluate.main(command(data, "--parts", "speed", "agree", "--impl", "interpret"))
    monkeypatch.setitem(evaluate.PARTS, "speed", lambda _: iter([{"A CPU": speed}]))
    assert evaluate.main(command(data, "--parts", "speed")) == 0
    found = json.loads((data / "new" / "results.json").read_text())
    assert list(found["agree"]) == ["float32"]
    assert found["speed"] == {"A card": speed, "A CPU": speed}


def test_what_is_missing_is_said_before_the_work(data, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("empty")
    more = ["--draft", str(elsewhere), "--run", str(elsewhere)]
    with pytest.raises(SystemExit) as refused:
        evaluate.main(command(data, *more, "--parts", "text", "agree"))
    wanted = [f"there is no {elsewhere / name}" for name in ("config.json", ranks.FILE)]
    wanted += [f"there is no {elsewhere / name}" for name in ("final.json", "run.json")]
    if jax.default_backend() == "cpu":
        wanted.append("on a CPU the specialized decode needs --impl interpret")
    assert str(refused.value) == f"error: {'; '.join(wanted)}"
    for name in ("final.json", "run.json"):
        (data / name).write_text('{"dtype": "bfloat16"}')
    with pytest.raises(SystemExit, match="own loss is of bfloat16: --dtype bfloat16"):
        evaluate.main(command(data, "--run", str(data), "--dtype", "float32"))
    (data / "meta.json").write_text('{"rank_file_sha256": "of another"}')
    with pytest.raises(SystemExit, match="was prepared with another tokenizer"):
        evaluate.main(command(data))


def test_curves_draw_a_log(tmp_path):
    log = Log(tmp_path / "log.csv", 0)
    for step in (250, 500):
        names = ("code", "chat", "gradient", "held_code", "load_least", "load_most")
        log.add({"step": step, **dict.fromkeys(names, 1.0 / step)})
    assert curves.main([str(tmp_path), str(tmp_path / "drawn" / "run")]) == 0
    assert read_log(tmp_path / "drawn" / "run.csv") == read_log(tmp_path / "log.csv")
    assert (tmp_path / "drawn" / "run.png").read_bytes().startswith(b"\x89PNG")
