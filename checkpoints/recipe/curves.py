"""A run's log as pictures: `python -m checkpoints.recipe.curves RUN_DIR PREFIX`.

Writes PREFIX.csv (the log) and PREFIX.png.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from checkpoints.recipe.saved import LOG, read_log

PANELS = (
    ("loss, nats a token", ("code", "held_code", "chat", "held_chat")),
    ("held-out code, bits a byte", ("held_code_bits_per_byte",)),
    ("an expert's load, even share = 1", ("load_least", "load_most")),
    ("norm of the gradient", ("gradient",)),
)


def draw(lines: list[dict[str, str]], file: Path) -> None:
    """One panel for each kind of number, over the steps."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharex=True, layout="constrained")
    steps = [int(line["step"]) for line in lines]
    for axis, (label, names) in zip(axes.flat, PANELS, strict=True):
        for name in names:
            if name in lines[0]:
                axis.plot(steps, [float(line[name]) for line in lines], label=name)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        if axis.lines:  # a run without code has no bits a byte of it
            axis.legend()
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Draw one run."""
    command = "python -m checkpoints.recipe.curves"
    parser = argparse.ArgumentParser(prog=command, description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", type=Path)
    parser.add_argument("prefix", metavar="PREFIX", type=Path)
    options = parser.parse_args(arguments)
    options.prefix.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.run / LOG, options.prefix.with_suffix(".csv"))
    draw(read_log(options.run / LOG), options.prefix.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
