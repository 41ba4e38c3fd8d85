"""One kernel from the inside: its implementations, its roofline, its tiles, its AMD resources."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.explore.clock import best_seconds
from pallas_kernels import Impl
from pallas_kernels.case_inputs import bind, inputs, options
from pallas_kernels.cases import Case
from pallas_kernels.linear_pallas import linear_pallas
from pallas_kernels.linear_tile_pallas import LinearTiles, linear_tiles

Arrays = Mapping[str, Any]
COLUMNS = ("programs", "warps", "vgprs", "agprs", "spills", "lds", "mfma", "code", "waves")


@dataclass(frozen=True)
class Gpu:
    """The two ceilings of a GPU for bf16 work."""

    name: str
    bandwidth: float  # bytes a second read from memory
    matrix: float  # floating-point operations a second
    source: str


GPUS = (
    Gpu("H200", 4.43e12, 810e12, "measured (benchmarks/RESULTS.md)"),
    Gpu("MI325X", 6.0e12, 1307e12, "data sheet"),
    Gpu("MI355X", 8.0e12, 2500e12, "data sheet"),
)


@dataclass(frozen=True)
class Outcome:
    """What one implementation of a case gave."""

    impl: Impl
    error: float  # largest difference from the float32 reference, as a share of its largest value
    milliseconds: float  # the shortest call on the wall clock, compiled before


def implementations() -> tuple[Impl, ...]:
    """Those that run on this machine: "pallas" only where JAX has a GPU."""
    compiled = jax.default_backend() == "gpu"
    return ("reference", "interpret", "pallas") if compiled else ("reference", "interpret")


def try_implementations(case: Case, dtype: Any = jnp.bfloat16) -> list[Outcome]:
    """Run a case whose result is one array under each of `implementations`."""
    arrays = inputs(case, dtype)
    wide = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == dtype else leaf, arrays
    )
    exact = np.asarray(bind(case, "reference")(wide))
    outcomes = []
    for impl in implementations():
        function = jax.jit(bind(case, impl))
        error = np.abs(np.asarray(function(arrays), np.float32) - exact).max() / np.abs(exact).max()
        outcomes.append(Outcome(impl, float(error), 1e3 * best_seconds(function, arrays)))
    return outcomes


def shapes(case: Case, dtype: Any = jnp.bfloat16) -> tuple[Arrays, Any]:
    """The arguments and the result of a case as shapes and dtypes; nothing is computed."""
    arrays = jax.eval_shape(functools.partial(inputs, case, dtype))
    return arrays, jax.eval_shape(bind(case, "reference"), arrays)


def linear_operations(case: Case) -> int:
    """Floating-point operations of a linear case's product."""
    return 2 * case.dims["W"] * case.dims["K"] * case.dims["N"]


def default_tiles(case: Case) -> LinearTiles:
    """The tiles that `linear` chooses for a bf16 case."""
    dims = case.dims
    return linear_tiles(dims["W"], dims["K"], dims["N"], exact=False)


def with_tiles(case: Case, tiles: LinearTiles, *, interpret: bool) -> Callable[[Arrays], jax.Array]:
    """A linear case's kernel with tiles of your choice, as a function of its arguments."""

    def run(arrays: Arrays) -> jax.Array:
        return linear_pallas(
            **arrays, **options(case), out_dtype=None, interpret=interpret, tiles=tiles
        )

    return run


def tiles_agree(case: Case, tiles: Sequence[LinearTiles], dtype: Any = jnp.bfloat16) -> list[float]:
    """The largest difference of each tile's interpreted result from the reference, as a share."""
    arrays = inputs(case, dtype)
    wanted = np.asarray(bind(case, "reference")(arrays), np.float32)
    found = [
        np.asarray(with_tiles(case, each, interpret=True)(arrays), np.float32) for each in tiles
    ]
    return [float(np.abs(each - wanted).max() / np.abs(wanted).max()) for each in found]


def describe(tiles: LinearTiles) -> str:
    """A short name of a tile."""
    split = f" / {tiles.split}" if tiles.split > 1 else ""
    return f"{tiles.features} x {tiles.depth}{split}, {tiles.warps} warps"


def amd_resources(
    case: Case, tiles: Sequence[LinearTiles], archs: Sequence[str] = ("gfx950", "gfx942")
) -> list[dict[str, Any]]:
    """What a linear case's kernel takes of an AMD GPU with each tile: one row each and arch.

    Compiles without a GPU. ImportError, which says what to install, if there is no triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the AMD compiler is the extra `aot`: pip install 'k3jax[aot]'")
    from pallas_kernels.aot import AmdCompiler, compile_function

    arrays, _ = shapes(case)
    rows = []
    with AmdCompiler() as compiler:
        for each in tiles:
            function = with_tiles(case, each, interpret=False)
            found = compile_function(function, arrays, compiler=compiler, archs=archs)
            rows += [{"tile": describe(each)} | row for row in found]
    return rows


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as lines of text, the columns as wide as they need to be; "-" where one is missing."""
    cells = [list(columns), *([str(row.get(name, "-")) for name in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
