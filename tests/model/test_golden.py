"""Every recorded number of the independent implementations, in float32."""

import numpy as np
import pytest

from k3jax import lm

K3_NAMES = {
    "attn_res": "attn_res",
    "attn_in": "attn_in",
    "attn_out": "attn_out",
    "mlp_res": "ffn_res",
    "mlp_in": "ffn_in",
    "mlp_out": "ffn_out",
    "out": "out",
    "kda_q": "kda_q",
    "kda_k": "kda_k",
    "kda_v": "kda_v",
    "kda_decay_log": "kda_decay",
    "kda_beta": "kda_beta",
    "kda_core_out": "kda_core",
    "kda_gated_norm_out": "kda_gated",
    "moe_latent_sum": "experts_sum",
}


@pytest.fixture(scope="module")
def traces(models, numbers):
    """Traces of every recorded sequence, all padded to one length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm, "SHORTEST", 256)
        return {
            (name, key[:4]): models[name].trace(ids)
            for name, arrays in numbers.items()
            for key, ids in arrays.items()
            if key.endswith("input_ids")
        }


@pytest.mark.parametrize(("model", "sequence"), [("k3-tiny-a", 0), ("k3-tiny-a", 1)])
def test_logits(traces, numbers, close, model, sequence):
    logits = traces[model, f"seq{sequence}"]["logits"]
    assert logits.dtype == np.float32
    close(logits, numbers[model][f"seq{sequence}.logits"])


@pytest.mark.parametrize(("model", "sequence"), [("k3-tiny-a", 2), ("kimi-linear-tiny", 1)])
def test_logits_at_recorded_positions(traces, numbers, close, model, sequence):
    logits = traces[model, f"seq{sequence}"]["logits"]
    positions = numbers[model][f"seq{sequence}.positions"]
    close(logits[positions], numbers[model][f"seq{sequence}.logits"])


def test_k3_intermediates(traces, numbers, close):
    checked = 0
    for key, wanted in numbers["k3-tiny-a"].items():
        sequence, _, name = key.partition(".")
        layer, _, name = name.partition(".")
        if name not in K3_NAMES:
            continue
        found = traces["k3-tiny-a", sequence][f"layers.{layer[1:]}.{K3_NAMES[name]}"]
        close(found.reshape(wanted.shape), wanted, key)
        checked += 1
    assert checked == 63


def test_k3_residual_blocks(traces, numbers, close):
    trace, arrays = traces["k3-tiny-a", "seq1"], numbers["k3-tiny-a"]
    close(trace["blocks"].swapaxes(0, 1), arrays["seq1.block_residual"])
    close(trace["output_res"], arrays["seq1.output_attn_res"])
    weights = trace["layers.4.ffn_res_weights"]
    assert weights.shape == (23, 4)  # three blocks, and the running sum
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    assert (weights[:, 2] == 0).all()  # the third block has not started


def test_kimi_linear_intermediates(traces, numbers, close):
    trace, arrays = traces["kimi-linear-tiny", "seq0"], numbers["kimi-linear-tiny"]
    names = ["embed", *(f"layers.{layer}.out" for layer in range(4)), "output_in"]
    for index, name in enumerate(names):
        close(trace[name], arrays[f"seq0.hidden{index}"], name)
    close(trace["logits"], arrays["seq0.logits"])


@pytest.mark.parametrize(
    "case",
    [
        ("k3-tiny-a", "seq1", "seq1.L{}.moe_{}", range(1, 7)),
        ("kimi-linear-tiny", "seq0", "seq0.moe{}.{}", range(1, 5)),
    ],
)
def test_experts(traces, numbers, close, case):
    model, sequence, pattern, layers = case
    trace = traces[model, sequence]
    for layer in layers:
        chosen = trace[f"layers.{layer}.router_experts"]
        order = np.argsort(chosen, axis=1)
        weights = np.take_along_axis(trace[f"layers.{layer}.router_weights"], order, axis=1)
        wanted = numbers[model][pattern.format(layer, "idx")]
        assert (np.take_along_axis(chosen, order, axis=1) == wanted).all()
        close(weights, numbers[model][pattern.format(layer, "w")])
