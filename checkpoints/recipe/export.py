"""A trained state as a checkpoint: `python -m checkpoints.recipe.export SOURCE TARGET`.

SOURCE is a run's directory or a .safetensors file that this wrote; TARGET is such a file (one file,
to carry away) or the directory of a checkpoint, as `k3jax.convert` writes it. What is stored is
what the training's forward pass computed with, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from checkpoints.recipe.model import SHAPES, model_config, raw_config
from checkpoints.recipe.ranks import TOKENIZER
from checkpoints.recipe.saved import RUN, load_weights
from k3jax.checkpoint import by_group, save_orbax
from k3jax.config import K3Config
from k3jax.logical import logical_params
from k3jax.sizes import is_expert
from pallas_kernels.mxfp4 import quantize


def stored(params: dict[str, np.ndarray], config: K3Config) -> dict[str, np.ndarray]:
    """Master weights f32 as a checkpoint's logical arrays: experts in MXFP4, all else rounded."""
    arrays = {}
    for name, spec in logical_params(config).items():
        if is_expert(name):
            codes, scales = quantize(params[name.removesuffix("_scale")])
            arrays[name] = scales if name.endswith("_scale") else codes
        else:
            dtype = ml_dtypes.bfloat16 if spec.dtype == "bf16" else np.float32
            arrays[name] = params[name].astype(dtype)
    return arrays


def save_directory(
    target: Path, arrays: dict[str, np.ndarray], raw: dict[str, Any], tokenizer: Path
) -> None:
    """Write a checkpoint's directory; the tokenizer's files come from another."""
    files = None if tokenizer.resolve() == target.resolve() else tokenizer
    config = K3Config.from_dict(raw)
    save_orbax(target, raw, by_group(arrays, config), files_from=files)


def read_source(source: Path) -> tuple[dict[str, np.ndarray], str]:
    """The logical arrays of a run or of a file, and the name of the model."""
    if source.is_dir():
        name = json.loads((source / RUN).read_text(encoding="utf-8"))["model"]
        return stored(load_weights(source), model_config(name)), name
    with safe_open(source, "numpy") as opened:
        name = (opened.metadata() or {}).get("model")
    if name not in SHAPES:
        raise ValueError(f"{source} does not say which model it is: {name!r}")
    return load_file(source), name


def main(arguments: list[str] | None = None) -> int:
    """Export; prints what was written and how large it is."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.recipe.export", description=__doc__
    )
    parser.add_argument("source", metavar="SOURCE", type=Path)
    parser.add_argument("target", metavar="TARGET", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="its files' directory")
    options = parser.parse_args(arguments)
    # Orbax warns at every save that there are no OCDBT files to merge: none are wanted.
    logging.getLogger("absl").setLevel(logging.ERROR)
    arrays, name = read_source(options.source)
    if options.target.suffix == ".safetensors":
        options.target.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, options.target, metadata={"model": name})
    else:
        save_directory(options.target, arrays, raw_config(SHAPES[name]), options.tokenizer)
    files = [options.target, *options.target.rglob("*")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    print(f"{name}: {options.target}, {size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
