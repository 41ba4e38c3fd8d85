"""Kimi-K3 whole, from shapes alone: what all its layers cost to trace and lower."""

import contextlib
import dataclasses
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import sharding

from k3jax.cache import CacheSizes, abstract_cache
from k3jax.config import K3Config
from k3jax.decode.batch import Step, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.layers import layer_kernels
from k3jax.decode.step import build_step
from k3jax.model.decoder import abstract_decoder
from k3jax.parallel import AXIS, make_mesh
from k3jax.params import packed_shapes, packed_specs

CONFIG = Path(__file__).parents[1] / "data" / "k3-config.json"
FEW = 13  # layers with one of each kind
TIMES = 3.0


def mesh_of_gpus(ranks):
    """A mesh to lower kernels for, and the context to do it in; without devices if JAX can."""
    if not hasattr(sharding, "AbstractDevice"):
        return make_mesh(ranks), contextlib.nullcontext()
    device = sharding.AbstractDevice("NVIDIA H200", 132, "cuda")
    kinds = (sharding.AxisType.Auto,)
    mesh = sharding.AbstractMesh((ranks,), (AXIS,), axis_types=kinds, abstract_device=device)
    return mesh, sharding.use_abstract_mesh(mesh)


def lowered(config, rows, requests):
    """The text of a step, and the seconds of this process that it took."""
    mesh, context = mesh_of_gpus(8)
    run = DecodeConfig(tp=8, num_spec=7, builds=((rows, requests), (1, 16)))
    sizes = CacheSizes(run.slots, 1000, run.page_size, run.max_pages, run.pending)
    begin = time.process_time()
    kernels = layer_kernels(config, run.tp, "pallas")
    step = Step("decode", requests, rows, specialized=True, kernels=kernels)
    graph, _ = abstract_decoder(config, run.tp, "pallas", run.dtype)
    function = build_step(graph, config, run, step, mesh=mesh, param_specs=packed_specs(config))
    with context:
        traced = function.trace(
            packed_shapes(config, run.tp),
            abstract_cache(config, sizes, run.dtype, mesh),
            empty_batch(step, sizes, config.vocab_size),
            jax.ShapeDtypeStruct((), jnp.uint32),
        )
        middle = time.process_time()
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    end = time.process_time()
    print(
        f"\n{config.num_layers} layers, {rows} x {requests}: traced in {middle - begin:.2f} s, "
        f"lowered in {end - middle:.2f} s"
    )
    return text, end - begin


@pytest.mark.parametrize(("rows", "requests"), [(1, 1), (8, 1), (1, 16), (8, 16)])
def test_a_layer_of_each_kind_stands_there_once(rows, requests):
    text, _ = lowered(K3Config.from_file(CONFIG), rows, requests)
    # Dense layer 0, KDA with and without the start of a block, MLA.
    shared = re.findall(r"func\.func .*@(layer_body\w*)\(", text)
    calls = [text.count(f"call @{name}(") for name in shared]
    assert sorted(calls) == [1, 7, 24, 61]
    assert not conditions(text)


def conditions(text):
    """Operations whose condition the host reads: it waits amid its dispatch for all before them.

    The choice of a platform is a `case` too, of a constant or of what another such choice gives.
    """
    made, found = {}, []
    for line in text.splitlines():
        if parts := re.match(r'\s*(%\w+)(?::\d+)? = "?stablehlo\.(\w+)"?(?:\((%\w+)\))?', line):
            name, operation, operand = parts.groups()
            chosen = operation == "case" and made.get(operand) in ("case", "constant")
            if operation in ("case", "if", "while") and not chosen:
                found.append(line.strip()[:100])
            made[name] = operation
    return found


def asked(x):
    return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: 2 * x, x)


@pytest.mark.parametrize("function", [asked, looped])
def test_conditions_are_found_behind_the_choice_of_a_platform(function):
    def text(cuda):
        def chosen(x):
            return jax.lax.platform_dependent(x, cuda=cuda, default=function)

        lowered = jax.jit(lambda x: chosen(chosen(x))).trace(jnp.zeros(3))
        return lowered.lower(lowering_platforms=("cuda",)).as_text()

    assert len(conditions(text(function))) == 2
    assert not conditions(text(jnp.sin))


def test_depth_costs_little():
    """All layers take little longer than the first ones, which have one of each kind."""
    whole = K3Config.from_file(CONFIG)
    first = {"num_layers": FEW, "mixers": whole.mixers[:FEW], "ffns": whole.ffns[:FEW]}
    all_of_them, few = (
        lowered(config, 8, 1)[1] for config in (whole, dataclasses.replace(whole, **first))
    )
    assert all_of_them < TIMES * few
