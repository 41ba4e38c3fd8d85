"""K3Config reads what a released config.json says, and refuses what is not computed here."""

import copy
import json
from pathlib import Path

import pytest

from k3jax.config import K3Config

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def k3():
    return json.loads((DATA / "k3-config.json").read_text())


@pytest.fixture(scope="module")
def kimi_linear():
    return json.loads((DATA / "kimi-linear-48b-config.json").read_text())


def changed(raw, path, value):
    """A copy with the dotted `path` set, or removed for `...`."""
    raw = copy.deepcopy(raw)
    *parents, last = path.split(".")
    target = raw
    for name in parents:
        target = target[name]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return raw


def test_released_k3():
    config = K3Config.from_file(DATA / "k3-config.json")
    assert config.num_layers == 93
    assert config.mixers.count("kda") == 69
    full = [i + 1 for i, mixer in enumerate(config.mixers) if mixer == "mla"]
    assert full == [*range(4, 93, 4), 93]
    assert config.ffns == ("dense", *["moe"] * 92)
    assert config.attn_res_blocks == 8
    assert config.moe.shared_inner == 6144
    assert config.moe.mxfp4
    assert config.kda.gate_lower_bound == -5.0
    assert hash(config) == hash(K3Config.from_file(DATA / "k3-config.json"))


def test_released_kimi_linear_ignores_its_meaningless_head_dim():
    config = K3Config.from_file(DATA / "kimi-linear-48b-config.json")
    assert config.kda.head_dim == 128  # the file's top-level head_dim says 72
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert config.mla.q_lora_rank is None
    assert config.moe.latent is None
    assert not config.moe.mxfp4
    assert config.attn_res_block is None
    assert config.attn_res_blocks == 0


def test_directory_or_file(golden):
    directory = golden / "k3-tiny-a"
    assert K3Config.from_file(directory) == K3Config.from_file(directory / "config.json")


TEXT = """hidden_size num_hidden_layers vocab_size intermediate_size rms_norm_eps hidden_act
activation_situ_beta activation_situ_linear_beta attn_res_block_size max_position_embeddings
bos_token_id eos_token_id pad_token_id first_k_dense_replace moe_layer_freq q_lora_rank kv_lora_rank
qk_nope_head_dim qk_rope_head_dim v_head_dim num_attention_heads mla_use_output_gate mla_use_nope
num_experts num_experts_per_token moe_intermediate_size routed_expert_hidden_size
latent_moe_use_norm num_shared_experts moe_renormalize routed_scaling_factor
moe_router_activation_func linear_attn_config"""
LINEAR = """num_heads head_dim short_conv_kernel_size gate_lower_bound use_full_rank_gate
kda_layers full_attn_layers"""


@pytest.mark.parametrize(
    "path", [*TEXT.split(), *(f"linear_attn_config.{name}" for name in LINEAR.split())]
)
def test_a_missing_number_is_named(k3, path):
    with pytest.raises(ValueError, match=path.split(".")[-1]):
        K3Config.from_dict(changed(k3, f"text_config.{path}", ...))


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        ("moe_router_activation_func", "softmax", "'softmax'"),
        ("topk_method", "greedy", "'greedy'"),
        ("num_expert_group", 8, "8"),
        ("topk_group", 4, "4"),
        ("mla_use_nope", False, "False"),
        ("tie_word_embeddings", True, "True"),
        ("hidden_act", "relu", "'relu'"),
        ("num_nextn_predict_layers", 1, "1"),
        ("num_key_value_heads", 8, "8"),
        ("attention_bias", True, "True"),
        ("hidden_size", "7168", "'7168'"),
        ("hidden_size", True, "True"),
        ("num_experts_per_token", 1000, "1000"),
        ("moe_intermediate_size", 3080, "3080"),
        ("linear_attn_config", None, "None"),
        ("linear_attn_config.short_conv_kernel_size", 3, "3"),
        ("linear_attn_config.gate_lower_bound", 5.0, "5.0"),
        ("quantization_config.format", "nvfp4-pack-quantized", "'nvfp4-pack-quantized'"),
        ("quantization_config.quant_method", "fp8", "'fp8'"),
        ("quantization_config.kv_cache_scheme", {"num_bits": 8}, "num_bits"),
        ("quantization_config.config_groups.group_0.weights.group_size", 16, "16"),
        ("quantization_config.config_groups.group_0.weights.symmetric", False, "False"),
        ("quantization_config.config_groups.group_0.weights.num_bits", 8, "8"),
        (
            "quantization_config.config_groups.group_0.input_activations",
            {"num_bits": 8},
            "num_bits",
        ),
        ("quantization_config.config_groups.group_0.targets", ["Embedding"], "Embedding"),
        ("quantization_config.config_groups.group_1", {}, "group_1"),
        ("quantization_config.ignore", "lm_head", "'lm_head'"),
        ("quantization_config.ignore", ["re:.*self_attn.*"], "lm_head would be quantized"),
        ("quantization_config.ignore", ["re:.*"], "experts.0.w1 would not be quantized"),
        ("quantization_config.ignore", ["re:("], "does not compile"),
    ],
)
def test_other_mathematics_is_refused_by_name_and_value(k3, path, value, shown):
    with pytest.raises(ValueError) as error:
        K3Config.from_dict(changed(k3, f"text_config.{path}", value))
    assert path.split(".")[-1] in str(error.value)
    assert shown in str(error.value)


@pytest.mark.parametrize(
    ("kda", "full", "shown"),
    [
        ([1, 2, 3], [3, 4, 5], r"both name \[3\]"),
        ([1, 2], [4, 5], r"neither .* names \[3\]"),
        ([0, 1, 2, 3], [4, 5], r"name \[0\], outside of 1 to 5"),
        ([1, 2, 3, 6], [4, 5], r"name \[6\], outside"),
        ([1, 1, 2, 3], [4, 5], r"twice: \[1\]"),
        ([1, 2, "3"], [4, 5], "must be a list of layer numbers"),
    ],
)
def test_layer_lists_cover_each_layer_once(golden, kda, full, shown):
    raw = json.loads((golden / "kimi-linear-tiny" / "config.json").read_text())
    raw["linear_attn_config"] |= {"kda_layers": kda, "full_attn_layers": full}
    with pytest.raises(ValueError, match=shown):
        K3Config.from_dict(raw)


def test_all_problems_come_together(k3):
    raw = changed(k3, "text_config.hidden_size", ...)
    raw = changed(raw, "text_config.topk_method", "greedy")
    raw = changed(raw, "text_config.linear_attn_config.num_heads", -1)
    with pytest.raises(ValueError, match=r"topk_method.*num_heads -1.*hidden_size is missing"):
        K3Config.from_dict(raw)


def test_keys_without_effect_are_ignored(k3, kimi_linear):
    assert K3Config.from_dict(changed(k3, "text_config.head_dim", 7)) == K3Config.from_dict(k3)
    same = changed(kimi_linear, "rope_scaling", {"type": "yarn"})
    assert K3Config.from_dict(same) == K3Config.from_dict(kimi_linear)
    assert K3Config.from_dict(changed(k3, "text_config.new_key", 1)) == K3Config.from_dict(k3)


def test_without_quantization_experts_are_bf16(k3):
    assert not K3Config.from_dict(changed(k3, "text_config.quantization_config", ...)).moe.mxfp4


def test_quantization_may_stand_at_the_top(k3):
    raw = changed(k3, "text_config.quantization_config", ...)
    raw["quantization_config"] = k3["text_config"]["quantization_config"]
    assert K3Config.from_dict(raw).moe.mxfp4


@pytest.mark.parametrize("model_type", ["llama", None])
def test_other_models_are_refused(k3, model_type):
    with pytest.raises(ValueError, match=f"model_type {model_type!r}"):
        K3Config.from_dict(k3 | {"model_type": model_type})
    with pytest.raises(ValueError, match="text_config"):
        K3Config.from_dict({"model_type": "kimi_k3"})


def test_what_is_no_config(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        K3Config.from_file(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list"):
        K3Config.from_file(tmp_path)
