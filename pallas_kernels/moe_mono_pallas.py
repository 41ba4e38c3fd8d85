"""The latent MoE of a decode step in one launch: operands, results and what lies between stages."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import launch
from pallas_kernels.activation import Activation
from pallas_kernels.moe_mono_stages import Items, Refs
from pallas_kernels.moe_mono_tiles import MonoTiles, Sizes, item_count, sizes_of, split_counts
from pallas_kernels.mxfp4_pallas import decoders, joined, tiled
from pallas_kernels.persistent import POLLS, Control, run_stages

NAME = "moe_mono"


def moe_mono_pallas(
    x: jax.Array,  # [W, D]
    live: jax.Array,  # i32[W]
    weights: Any,  # LatentMoeWeights
    control: jax.Array,  # i32[words]
    *,
    top_k: int,
    scaling: float,
    renormalize: bool,
    activation: Activation,
    interpret: bool,
    tiles: MonoTiles,
    polls: int = POLLS,
) -> tuple[jax.Array, ...]:
    """Returns (control, routed, shared, experts, weights)."""
    bank = weights.bank
    sizes = sizes_of(x, weights, top_k)
    operands = (
        control, x, live, weights.router, weights.bias, weights.down, weights.shared_gate_up,
        weights.shared_down, tiled(bank.w13), joined(bank.w13_scale), tiled(bank.w2),
        joined(bank.w2_scale), bank.w13, bank.w2,
    )  # fmt: skip
    run = functools.partial(
        _run,
        sizes=sizes,
        options={"top_k": top_k, "scaling": scaling, "renormalize": renormalize},
        activation=activation,
        interpret=interpret,
        polls=polls,
    )
    wide = dataclasses.replace(
        tiles,
        rows=max(16, tiles.rows),
        experts=dataclasses.replace(tiles.experts, rows=max(16, tiles.experts.rows)),
    )
    cuda_decoder, portable_decoder = decoders(x.dtype, interpret=interpret)
    return launch.by_platform(
        *operands,
        cuda=functools.partial(run, tiles=tiles, decoder=cuda_decoder, pauses=True),
        portable=functools.partial(run, tiles=wide, decoder=portable_decoder, pauses=False),
        interpret=interpret,
    )


def _run(*operands, sizes: Sizes, options, activation, interpret, tiles, decoder, pauses, polls):
    if tiles.experts.prepare:
        decoder = dataclasses.replace(decoder, ready=True)
    x = operands[1]
    pairs, rows = sizes.W * sizes.J, tiles.rows
    shape = jax.ShapeDtypeStruct
    results = (
        shape(operands[0].shape, jnp.int32),
        shape((sizes.W, sizes.Z), jnp.float32),
        shape((sizes.W, sizes.D), jnp.float32),
        shape((sizes.W, sizes.J), jnp.int32),
        shape((sizes.W, sizes.J), jnp.float32),
    )
    between = (
        shape((sizes.W, sizes.E), jnp.float32),
        shape((sizes.W, sizes.Z), x.dtype),
        shape((sizes.W, sizes.S), x.dtype),
        shape((pairs, sizes.I), x.dtype),
        shape((pairs, sizes.Z), jnp.float32),
        *(
            shape((splits, features, rows), jnp.float32)
            for features, splits in zip(
                (sizes.E, sizes.Z, 2 * sizes.S), split_counts(tiles, sizes.D), strict=True
            )
        ),
        shape((1,), jnp.int32),
    )
    out = launch.launch(
        functools.partial(
            _kernel,
            sizes=sizes,
            options=options,
            activation=activation,
            interpret=interpret,
            tiles=tiles,
            decoder=decoder,
            pauses=pauses,
            polls=polls,
        ),
        *operands,
        name=NAME,
        grid=(item_count(sizes, tiles),),
        out_shape=(*results, *between),
        interpret=interpret,
        num_warps=tiles.experts.warps,
        aliases={0: 0},
    )
    return out[: len(results)]


def _kernel(*arrays, sizes, options, activation, interpret, tiles, decoder, pauses, polls):
    refs = Refs(*arrays)
    control = Control(refs.control, interpret=interpret, pauses=pauses, polls=polls)
    items = Items(
        refs, control, sizes, tiles, activation=activation, decoder=decoder, options=options
    )
    run_stages(control, items.stages())
