"""Which steps run kernels: seen in what is traced, since no CPU compiles them."""

import re

import jax
import jax.numpy as jnp
import pytest

from k3jax.cache import CacheSizes, abstract_cache
from k3jax.config import K3Config
from k3jax.decode.batch import Step, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.step import build_step
from k3jax.model.decoder import abstract_decoder
from k3jax.parallel import make_mesh
from k3jax.params import packed_shapes, packed_specs

FEW_ROWS = {"linear_skinny", "linears", "choose_beside", "moe_mxfp4_up", "moe_mxfp4_down"}
MANY_ROWS = {"moe_mxfp4_up_grouped", "moe_mxfp4_down_grouped", "attn_res_rows"}
RESIDUALS = {"attn_res_products", "attn_res_mix"}
DECODE = {"kda_decode", "mla_decode", *RESIDUALS}
PREFILL = {"kda_prefill_chunk", "kda_prefill_walk", "kda_prefill_output", "mla_prefill", *RESIDUALS}


@pytest.mark.parametrize(
    ("step", "kernels"),
    [
        (Step("decode", 4, 1), DECODE | FEW_ROWS),
        (Step("prefill", 1, 64), PREFILL | FEW_ROWS),
        # The head's linear layer and its residuals still have one row.
        (Step("prefill", 1, 128), PREFILL | MANY_ROWS | {"linear_skinny"}),
    ],
    ids=("decode", "few", "many"),
)
def test_kernels_run_where_they_are_made_for(golden, step, kernels):
    """Those that stream weights past few rows are not asked for more, nor are they forgotten."""
    config, mesh = K3Config.from_file(golden / "k3-tiny-a"), make_mesh(1)
    run = DecodeConfig(impl="pallas", max_requests=4, page_size=16)
    sizes = CacheSizes(run.slots, 9, run.page_size, run.max_pages, run.pending)
    graph, _ = abstract_decoder(config, run.tp, run.impl, run.dtype)
    function = build_step(graph, config, run, step, mesh=mesh, param_specs=packed_specs(config))
    traced = function.trace(
        packed_shapes(config, 1),
        abstract_cache(config, sizes, run.dtype, mesh),
        empty_batch(step, sizes, config.vocab_size),
        jax.ShapeDtypeStruct((), jnp.uint32),
    )
    found = set(re.findall(r"\bname=(\w+)", str(traced.jaxpr)))
    assert found & (DECODE | PREFILL | FEW_ROWS | MANY_ROWS) == kernels
