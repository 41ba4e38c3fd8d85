"""Convert a checkpoint: `python -m k3jax.convert SRC DST [--to orbax|hf]`.

SRC is a Hugging Face checkpoint (to orbax) or a converted one (to hf). A conversion that was
stopped, even killed, goes on where it was when the same command runs again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tqdm import tqdm

from k3jax.checkpoint.export import save_hf
from k3jax.checkpoint.files import (
    ConversionState,
    conversion_state,
    copy_small_files,
    fingerprint,
    write_state,
    write_text,
)
from k3jax.checkpoint.loading import open_checkpoint
from k3jax.checkpoint.orbax import PARAMS
from k3jax.checkpoint.saving import Done, save_source
from k3jax.config import K3Config
from k3jax.sizes import bytes_at_rest
from k3jax.tokenizer_json import tokenizer_files


def convert(source: str | Path, target: str | Path, to: str, done: Done) -> None:
    """Convert the checkpoint in `source` into the directory `target`.

    to: "orbax" or "hf". done: called with each group and its bytes, also with those that an earlier
    run left. Values stay bit for bit; vision tensors and layers past the last are left out. Host
    memory stays near the largest stacked tensor. With "hf" a `tokenizer.json` is made from the rank
    file. Raises ValueError if the source is broken, is of that kind already, or if `target` holds
    something else.
    """
    source, target = Path(source), Path(target)
    if to not in ("orbax", "hf"):
        raise ValueError(f"a checkpoint converts to 'orbax' or 'hf', not to {to!r}")
    config = K3Config.from_file(source)
    is_orbax = (source / PARAMS).is_dir()
    if is_orbax == (to == "orbax"):
        kind, other = ("an Orbax", "hf") if is_orbax else ("a Hugging Face", "orbax")
        raise ValueError(f"{source} is {kind} checkpoint already: it converts with --to {other}")
    made_files = tokenizer_files(source) if to == "hf" else {}
    with open_checkpoint(source, config) as opened:
        state = ConversionState(str(source), fingerprint(source), finished=False)
        _check_target(target, state)
        target.mkdir(parents=True, exist_ok=True)
        write_state(target, state)
        if to == "orbax":
            save_source(opened, target, done)
        else:
            save_hf(opened, target, done)
    copy_small_files(source, target)
    for name, text in made_files.items():
        write_text(target / name, text)
    write_state(target, ConversionState(state.source, state.fingerprint, finished=True))


def _check_target(target: Path, state: ConversionState) -> None:
    """Raise ValueError unless `target` is new, empty, or was begun from the same files."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is not a directory")
    earlier = conversion_state(target)
    if earlier is None and any(target.iterdir()):
        raise ValueError(
            f"{target} is not empty and no earlier conversion: choose another directory"
        )
    if earlier is not None and earlier.fingerprint != state.fingerprint:
        raise ValueError(
            f"{target} was begun from other files than {state.source} holds now "
            f"({earlier.source}): delete it or choose another directory"
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m k3jax.convert", description=__doc__)
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("--to", choices=("orbax", "hf"), default="orbax")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Convert with a progress bar; 1, and the reason on stderr, if it cannot be done."""
    options = _parse(arguments)
    # Orbax warns at every save that there are no OCDBT files to merge: none are wanted.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        total = bytes_at_rest(K3Config.from_file(options.source))
        with tqdm(total=total, unit="B", unit_scale=True, desc="convert") as bar:

            def done(group: str, size: int) -> None:
                bar.set_postfix_str(group)
                bar.update(size)

            convert(options.source, options.target, options.to, done)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
