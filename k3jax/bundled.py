"""The checkpoint that comes with the package."""

from __future__ import annotations

from pathlib import Path

NAME = "k3-nano"


def bundled_model() -> Path:
    """Directory of k3-nano: inside an installed package, or at the root of a source checkout.

    Raises FileNotFoundError if neither is there.
    """
    package = Path(__file__).resolve().parent
    for root in (package, package.parent):
        directory = root / "checkpoints" / NAME
        if (directory / "config.json").is_file():
            return directory
    raise FileNotFoundError(f"{NAME} is not in this installation: give a model's directory")
