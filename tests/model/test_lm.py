"""The notebook object: texts and ids in, texts and ids out."""

import subprocess
import sys

import numpy as np
import pytest

import k3jax
from k3jax import lm
from k3jax.bundled import bundled_model
from k3jax.tokenizer import Tokenizer


def test_ids_for_ids(models, numbers):
    arrays = numbers["k3-tiny-a"]
    wanted = arrays["seq1.greedy"].tolist()
    prompt = arrays["seq1.input_ids"]
    assert models["k3-tiny-a"].generate(prompt, max_tokens=24, ignore_eos=True) == wanted


def test_text_for_text(models):
    model = models["k3-tiny-a"]
    tokenizer = Tokenizer.from_directory(bundled_model())
    speaking = lm.LanguageModel(
        model.params, model.config, model.decode_config, model.mesh, tokenizer=tokenizer
    )
    speaking.engine = model.engine  # compiled already
    ids = model.generate(tokenizer.encode("To be"), max_tokens=8)
    assert speaking.generate("To be", max_tokens=8) == tokenizer.decode(ids)
    drawn = speaking.generate("To be", max_tokens=8, temperature=1.0, seed=3)
    assert drawn == speaking.generate("To be", max_tokens=8, temperature=1.0, seed=3)


def test_refusals(models):
    model = models["kimi-linear-tiny"]
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        model.logits("text")
    with pytest.raises(ValueError, match=r"token id 192 is not in \[0, 192\)"):
        model.logits([1, 192])
    with pytest.raises(ValueError, match="at least one token"):
        model.trace(np.array([], np.int32))


def test_the_package_loads_jax_only_for_models():
    found = "'jax' in sys.modules"
    code = f"import sys, k3jax; assert not {found}; k3jax.load; assert {found}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = k3jax.nothing
