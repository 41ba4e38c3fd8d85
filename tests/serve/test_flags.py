"""What the command line says of speculation."""

import pytest
from fake_engine import CHECKPOINT

from k3jax.serve.__main__ import front_settings, main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-spec 3", "--num-spec 3 needs a --drafter"),
        ("--num-spec 3 --drafter none", "--num-spec 3 needs a --drafter"),
        ("--drafter ngram", "--drafter ngram needs --num-spec"),
        ("--drafter n-gram --num-spec 3", "--drafter n-gram is not none, ngram or"),
    ],
)
def test_drafts_and_drafter_come_together(flags, message, capsys):
    assert main(flags.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("drafter", ["ngram", str(CHECKPOINT)])
def test_flags_reach_the_engine(drafter):
    flags = ["--drafter", drafter, "--num-spec", "7", "--builds", "8x1,4x4,1x16"]
    worker = front_settings(flags).worker
    assert (worker.drafter, worker.num_spec) == (drafter, 7)
    assert worker.builds == [(8, 1), (4, 4), (1, 16)]
