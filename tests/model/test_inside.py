"""What the notebooks' helpers say of a model is what the model does."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.explore import drafts, experts, layers_with, memory, residuals, spelled
from k3jax.tokenizer import Tokenizer
from pallas_kernels.mxfp4 import GROUP

TOKENS = 40


@pytest.fixture(scope="module")
def model(models):
    return models["k3-tiny-a"]


@pytest.fixture(scope="module")
def trace(model, numbers):
    return model.trace(np.resize(numbers["k3-tiny-a"]["seq0.input_ids"], TOKENS))


def close(found, wanted, tolerance=1e-5):
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def written(keys, values, decay=0.0, beta=1.0):
    """A trace of one KDA layer of one head: rows [T, K] and [T, V], the same gates throughout."""
    tokens = len(keys)
    return {
        "layers.0.kda_q": keys,
        "layers.0.kda_k": keys,
        "layers.0.kda_v": values,
        "layers.0.kda_decay": np.full((tokens, 1, keys.shape[1]), decay, np.float32),
        "layers.0.kda_beta": np.full((tokens, 1), beta, np.float32),
    }


@pytest.fixture
def one_head(model):
    """The config of the layer that `written` makes."""
    return replace(model.config, kda=replace(model.config.kda, num_heads=1))


def test_the_recurrence_is_the_one_that_ran(trace, model):
    for layer in layers_with(trace, "kda_core"):
        inputs = memory.recurrence(trace, layer, model.config)
        wanted = trace[f"layers.{layer}.kda_core"]
        close(memory.recurrent(inputs)[0], wanted)
        assert memory.compare_forms(trace, layer, model.config).shape == (32,)
        assert memory.compare_forms(trace, layer, model.config).max() < 1e-5


def test_the_first_write_fills_an_empty_state(trace, model):
    layer = layers_with(trace, "kda_core")[0]
    found = memory.state_norms(trace, layer, model.config)
    inputs = memory.recurrence(trace, layer, model.config)
    lengths = [np.linalg.norm(leaf[0, 0], axis=-1) for leaf in (inputs.key, inputs.value)]
    assert found.shape == (TOKENS, model.config.kda.num_heads)
    close(found[0], inputs.beta[0, 0] * lengths[0] * lengths[1])


def test_orthogonal_keys_are_all_remembered(one_head):
    keys = np.eye(8, dtype=np.float32)
    values = np.random.default_rng(1).standard_normal((8, 16)).astype(np.float32)
    found, control = memory.recall(written(keys, values), 0, one_head)
    close(found, np.ones(7))
    assert control.max() < 0.9
    norms = memory.state_norms(written(keys, values), 0, one_head)[:, 0]
    close(norms, np.sqrt(np.cumsum((values**2).sum(axis=1))))


def test_one_key_remembers_the_last_value_alone(one_head):
    keys = np.tile(np.eye(8, dtype=np.float32)[:1], (8, 1))
    values = np.eye(8, dtype=np.float32)
    found, _ = memory.recall(written(keys, values), 0, one_head)
    close(found, np.eye(1, 7)[0])


def test_half_lives():
    keys = np.eye(4, dtype=np.float32)
    made = written(keys, keys, decay=-np.log(2) / 5)
    close(memory.half_lives(made, 0), np.full((1, 4), 5.0))
    close(memory.retention(made, 0), np.full((4, 1, 4), 0.5**0.2))
    close(memory.half_lives(written(keys, keys), 0), np.full((1, 4), 1e9))


def test_every_block_that_exists_is_read(trace, model):
    names, weights = residuals.reads(trace, model.config)
    assert names[:3] == ["0 kda", "0 ffn", "1 kda"]
    assert names[-1] == "output"
    assert weights.shape == (2 * model.config.num_layers + 1, TOKENS, 4)
    close(np.nansum(weights, axis=-1), np.ones(weights.shape[:2]))
    assert (np.nan_to_num(weights, nan=1.0) > 0).all()  # no block that exists has no weight
    exist = residuals.existing(weights)
    assert exist.tolist() == [1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]
    assert (residuals.sources(weights) <= exist[:, None] + 1e-6).all()
    assert residuals.spread(weights)[0] == 0


def test_sources_and_spread_of_made_weights():
    even, lone = np.array([0.25] * 4), np.array([np.nan, 0.0, 0.0, 1.0])
    close(residuals.sources(np.stack([even, lone])), [4.0, 1.0])
    close(residuals.spread(np.array([[even, even], [[1, 0, 0, 0], [0, 0, 0, 1]]])), [0, 0.5])


def test_no_attention_residuals(models):
    with pytest.raises(ValueError, match="no attention residuals"):
        residuals.reads({}, models["kimi-linear-tiny"].config)


def test_load_and_overlap(trace, model):
    layers, load = experts.load(trace, model.config)
    assert layers == layers_with(trace, "router_weights")
    close(load.mean(axis=1), np.ones(len(layers)))
    choices = np.array([[0, 1], [1, 2], [3, 4], [0, 1]])
    close(experts.distinct(choices, [1, 2, 4]), [2, (3 + 4 + 4) / 3, 5])
    close(experts.distinct(choices, [4], shuffled=True), [5])
    close(experts.distinct_if_even(model.config, [1]), [model.config.moe.top_k])


def test_bytes_are_those_of_the_arrays(model):
    ffn = model.params["layers"][1]["ffn"]
    bank = sum(ffn[name].nbytes for name in ("w13", "w13_scale", "w2", "w2_scale"))
    assert experts.expert_bytes(model.config) * model.config.moe.num_experts == bank
    rest = ("router", "down", "up", "shared_gate_up", "shared_down")
    assert experts.other_bytes(model.config) == sum(ffn[name].nbytes for name in rest)


def test_experts_are_on_the_grid_and_others_are_not(model):
    errors = experts.errors_by_layer(model)
    assert np.isnan(errors["mixer out"][0])  # a dense layer
    for name, error in errors.items():
        if name.startswith("routed"):
            assert (error[1:] == 0).all()
        else:
            assert ((error[1:] > 0.05) & (error[1:] < 0.2)).all(), name
    with pytest.raises(ValueError, match="layer 0 has no MXFP4 experts"):
        experts.layer_matrices(model, 0)


def test_code_shares(model):
    assert experts.code_shares(model, 1).sum() == pytest.approx(100)
    assert experts.normal_code_shares().sum() == pytest.approx(100)
    assert experts.relative_error(np.tile(experts.VALUES, (3, GROUP // 8))) == 0


def test_a_run_counts_its_steps(model, numbers):
    prompt = numbers["k3-tiny-a"]["seq0.input_ids"]
    run = drafts.run(model, prompt, 12)
    decoded = sum(count for name, count in run.steps.items() if name != "stock/prefill")
    assert len(run.tokens) + 1 <= decoded
    assert run.tokens_per_step == np.mean(run.tokens)
    assert run.tokens_per_second > 0
    with pytest.raises(ValueError, match="1 tokens are too few"):
        drafts.run(model, prompt, 1)


def test_acceptance_by_position():
    close(drafts.acceptance([1, 2, 4, 4], 3), [75, 50, 50])


def test_labels_show_what_cannot_be_seen():
    tokenizer = Tokenizer.from_directory(Path(__file__).parents[2] / "checkpoints" / "k3-tiny")
    ids = [*tokenizer.encode("a b\n"), tokenizer.eos_id]
    assert "".join(spelled(tokenizer, ids)) == "a␣b↵[EOS]"
    with pytest.raises(ValueError, match="no layer of this trace has 'kda_q'"):
        layers_with({"logits": jnp.zeros(1)}, "kda_q")
