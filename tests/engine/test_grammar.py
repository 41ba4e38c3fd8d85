"""Grammars in the engine: what is said fits, with speculation too, and nobody else is touched."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from test_model import FewPages, serve
from test_speculative import DRAFTED, RUN

from k3jax.chat import end_ids
from k3jax.chat.constrain import Calls, Form, constrain_message, constrain_text
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.executor import Executor
from k3jax.engine import Engine
from k3jax.guided import Guides
from k3jax.parallel import make_mesh
from k3jax.request import Request, SamplingParams
from k3jax.speculative import NgramDrafter
from k3jax.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent.parent
PATH = ROOT / "tests" / "golden" / "k3-tiny-a"  # the model of the neighbouring tests
TOKENIZER = Tokenizer.from_directory(ROOT / "checkpoints" / "k3-tiny")
END_IDS = end_ids(TOKENIZER)
GUIDES = Guides(TOKENIZER, END_IDS)
SPECULATING = replace(RUN, drafter="ngram", **DRAFTED["ngram"])
PLAIN = replace(SPECULATING, builds=((1, 4),))  # the same executor, whose drafts nobody verifies
TOOL = {"properties": {"n": {"type": "integer"}, "s": {"enum": ["x", "yy"]}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
GRAMMARS = {
    "choice": constrain_text(Form("choice", ["yes, of course", "no, never"])),
    "regex": constrain_text(Form("regex", "(ab){3,40}c")),
    "json": constrain_text(Form("json_schema", {"type": "array", "items": {"const": 12}})),
    "call": constrain_message(TOKENIZER, thinking=False, calls=Calls(TOOLS, parallel=False)),
}


@pytest.fixture(scope="module")
def executor():
    config, mesh = K3Config.from_file(PATH), make_mesh(1)
    params = load_params(PATH, config, mesh)
    return Executor(params, config, SPECULATING, mesh, drafter=NgramDrafter())


@pytest.fixture
def make_engine(executor):
    def make(run=PLAIN, runs=executor, guides=GUIDES):
        return Engine(runs, executor.config, run, end_ids=END_IDS, guides=guides)

    return make


def wish(grammar=None, **params):
    """(prompt, params) of a request."""
    wishes = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "grammar": grammar, **params}
    return TOKENIZER.encode("Say it: ababab"), SamplingParams(**wishes)


def wishes_of(*names, **params):
    return {name: wish(GRAMMARS[name], **params) for name in names}


def request(name, *wishes, **params):
    prompt, wanted = wish(*wishes, **params)
    return Request(request_id=name, prompt_ids=prompt, params=wanted)


def fits(grammar, ids):
    """Whether ids are a text of a grammar, or the beginning of one that the limit cut short."""
    matcher = GUIDES.matcher(grammar)
    matcher.advance(ids)
    return matcher.error is None and (matcher.is_complete or len(ids) == 60)


def test_what_is_said_fits(make_engine):
    texts = serve(make_engine(), wishes_of(*GRAMMARS))
    for name, grammar in GRAMMARS.items():
        assert fits(grammar, texts[name]), TOKENIZER.decode(texts[name])
    assert TOKENIZER.decode(texts["choice"]) in ("yes, of course", "no, never")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_text(make_engine, temperature):
    wishes = wishes_of("choice", "regex", "json", temperature=temperature)
    engine = make_engine(SPECULATING)
    assert serve(engine, wishes) == serve(make_engine(), wishes)
    (steps,) = (count for path, count in engine.stats().steps.items() if "prefill" not in path)
    assert steps < 50  # of up to 60 tokens: drafts were accepted


def test_company_changes_no_text(make_engine):
    free = {"free": wish(max_tokens=30, ignore_eos=True)}
    alone = serve(make_engine(), free)
    guided = {name: serve(make_engine(), wishes_of(name))[name] for name in ("regex", "call")}
    together = serve(make_engine(), {**free, **wishes_of("regex", "call")}, joins=(0, 5, 9))
    assert together == {**alone, **guided}


def test_a_preempted_request_goes_on_in_its_grammar(make_engine, executor):
    wanted = serve(make_engine(), wishes_of("regex", "call"))
    few = make_engine(runs=FewPages(executor, 20))
    free = {name: wish(max_tokens=40, ignore_eos=True) for name in ("a", "b")}
    texts = serve(few, {**free, **wishes_of("regex", "call")})
    assert few.stats().preemptions > 0
    assert {name: texts[name] for name in wanted} == wanted


@pytest.mark.parametrize("known", [1, 17])
def test_another_engine_goes_on_in_the_grammar(make_engine, known):
    whole = serve(make_engine(), wishes_of("regex"))["regex"]
    engine = make_engine(SPECULATING)
    begun = request("a", GRAMMARS["regex"])
    engine.add(msgspec.structs.replace(begun, generated=whole[:known]))
    rest = [token for _ in range(99) for delta in engine.step() for token in delta.token_ids]
    assert whole[:known] + rest == whole


def test_a_grammar_that_cannot_be_read_is_refused(make_engine):
    engine, without = make_engine(), make_engine(guides=None)
    with pytest.raises(ValueError, match="regex"):
        engine.add(request("a", '{"grammars": [{"lark_grammar": "start: /(/"}]}'))
    with pytest.raises(ValueError, match="not offered"):
        without.add(request("a", GRAMMARS["regex"]))
    assert not engine.has_work()
    assert not without.has_work()


class Breaks:
    """A grammar that becomes too much work after three tokens."""

    error = None

    def __init__(self, grammar):
        self.said = 0

    def fill(self, mask, drafts=()):
        assert mask.shape == (1, 16)

    def advance(self, tokens):
        self.said += len(tokens)
        self.error = "the grammar cannot be followed: enough" if self.said > 3 else None


def test_a_grammar_that_breaks_fails_its_request_alone(make_engine):
    engine = make_engine(guides=SimpleNamespace(matcher=Breaks))
    engine.add(request("a", "any", ignore_eos=True))
    engine.add(request("b", max_tokens=9, ignore_eos=True))
    ends = {}
    while engine.has_work():
        ends |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason}
    assert (ends["a"].finish_reason, ends["b"].finish_reason) == ("error", "length")
    assert "enough" in ends["a"].error
    assert engine.allocator.in_use == 0


def test_rows_after_a_refused_draft_are_left_alone():
    matcher = GUIDES.matcher(GRAMMARS["regex"])
    a, b = TOKENIZER.encode("ab")
    mask = np.full((4, 16), 0xFFFFFFFF, np.uint32)
    matcher.fill(mask, [a, a, b])
    allowed = [np.unpackbits(row.view(np.uint8), bitorder="little").sum() for row in mask]
    assert allowed == [1, 1, 512, 512]
    again = np.zeros((2, 16), np.uint32)
    matcher.fill(again, [-1])
    assert (again[0] == mask[0]).all()
    assert not again[1].any()
