"""The notebook object: texts and ids in, texts and ids out."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import k3jax
from k3jax import lm
from k3jax.chat import ChatOptions, ChatParser, encode, message_of, render
from k3jax.tokenizer import Tokenizer


def test_ids_for_ids(models, numbers):
    arrays = numbers["kimi-linear-tiny"]
    wanted = arrays["seq0.greedy"].tolist()
    model = models["kimi-linear-tiny"]
    assert model.generate(arrays["seq0.input_ids"], max_tokens=32, ignore_eos=True) == wanted


@pytest.fixture
def speaking(models):
    """A golden model with k3-tiny's tokenizer."""
    model = models["k3-tiny-a"]
    speaking = lm.LanguageModel(
        model.params,
        model.config,
        model.decode_config,
        model.mesh,
        tokenizer=Tokenizer.from_directory(Path(__file__).parents[2] / "checkpoints" / "k3-tiny"),
    )
    speaking.engine = model.engine  # compiled already
    return speaking


def test_text_for_text(speaking):
    tokenizer = speaking.tokenizer
    ids = speaking.generate(tokenizer.encode("To be"), max_tokens=8)
    assert speaking.generate("To be", max_tokens=8) == tokenizer.decode(ids)
    drawn = speaking.generate("To be", max_tokens=8, temperature=1.0, seed=3)
    assert drawn == speaking.generate("To be", max_tokens=8, temperature=1.0, seed=3)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_chat_is_the_parse_of_what_is_generated(speaking, thinking):
    messages = [{"role": "user", "content": "Hello"}]
    options = ChatOptions(thinking=thinking)
    prompt = encode(speaking.tokenizer, render(messages, None, options))
    ids = speaking.generate(prompt, max_tokens=12)
    parser = ChatParser(speaking.tokenizer, thinking=thinking)
    wanted = message_of(parser.push(ids) + parser.finish())
    found = message_of(speaking.chat(messages, options=options, max_tokens=12))
    assert found == wanted
    assert found["reasoning_content" if thinking else "content"]


def test_a_chat_asks_for_tools(speaking):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    messages = [{"role": "user", "content": "Hello"}]
    asked = []
    speaking.engine = SimpleNamespace(stream=lambda ids, params: asked.append(ids) or iter(()))
    assert list(speaking.chat(messages, tools=tools)) == []
    assert asked == [encode(speaking.tokenizer, render(messages, tools, ChatOptions()))]


def test_refusals(models):
    model = models["kimi-linear-tiny"]
    with pytest.raises(ValueError, match="no chat without text"):
        next(model.chat([{"role": "user", "content": "Hello"}]))
    with pytest.raises(ValueError, match="no tokenizer: give token ids"):
        model.logits("text")
    with pytest.raises(ValueError, match=r"token id 192 is not in \[0, 192\)"):
        model.logits([1, 192])
    with pytest.raises(ValueError, match="at least one token"):
        model.trace(np.array([], np.int32))
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        model.logits([1.7])


def test_the_package_names_what_it_loads_lazily():
    assert k3jax.load is lm.load
    assert k3jax.LanguageModel is lm.LanguageModel
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = k3jax.nothing
