"""Stock and specialized decode give the same greedy text, whatever the drafts.

A few steps are interpreted on a CPU; `-m gpu` runs every width compiled.
"""

import numpy as np
import pytest
from conversing import Conversations, FewPages, check_conversations, engine_of
from driving import Driver
from made import (
    WHOLE_HEAVY,
    both_texts,
    drafters,
    drive,
    made_config,
    made_weights,
    run_of,
    text_of,
)

from k3jax.cache import make_cache
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode import executor as executor_module
from k3jax.decode.executor import Executor, stock_builds
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.request import Request, SamplingParams

KINDS = ("right", "wrong", "mixed")


def specialized_steps(driver):
    """The driver's decode steps, all of which must be specialized."""
    steps = [step for step in driver.executor.steps if step.kind == "decode"]
    assert steps
    assert all(step.specialized for step in steps)
    return steps


@pytest.fixture(scope="module")
def small(golden):
    """A model with one layer of each kind, on both paths, the kernels interpreted."""
    config = made_config(golden, ("kda", "kda", "mla"), block=2)
    weights = made_weights(config)
    fields = {"builds": ((1, 2), (3, 2)), "prefix_cache": None}
    runs = run_of("stock", **fields), run_of("specialized", **fields, impl="interpret")
    return tuple(drive(config, weights, run) for run in runs)


def test_interpreted_kernels_give_the_stock_text(small):
    stock, special = small
    specialized_steps(special)
    prompt = list(range(3, 14))
    wanted = text_of(stock, prompt, 12)
    assert len(set(wanted)) > 4
    assert text_of(special, prompt, 12) == wanted
    vocabulary = stock.executor.config.vocab_size
    for drafter in drafters(wanted, 3, vocabulary).values():
        assert text_of(special, prompt, 12, rows=3, drafter=drafter) == wanted


def test_layers_without_a_kernel_run_the_ops_of_their_step(small, monkeypatch):
    """References replay by loops that the host conducts: they are for the stock path alone."""

    class Asked(Exception):
        pass

    def abstract_decoder(config, tp, impl, dtype):
        raise Asked(impl)

    monkeypatch.setattr(executor_module, "abstract_decoder", abstract_decoder)
    executor = small[1].executor
    wanted = dict.fromkeys(executor.steps, "interpret")
    wanted |= dict.fromkeys(stock_builds(executor.decode_config), "reference")
    assert len(wanted) == 5
    for step, impl in wanted.items():
        with pytest.raises(Asked, match=impl):
            executor._lower(step, executor.sizes)


def test_a_request_changes_its_path_between_steps(small):
    """Both paths take over what the other left pending."""
    stock, special = small
    prompt = [5, 300, 41, 7]
    wanted = text_of(stock, prompt, 9, slot=2)
    tokens = stock.prefill(2, prompt, chunks=(32,))[-1].tokens[0].tolist()
    drivers = [special, stock] * 4
    for number, driver in enumerate(drivers):
        other = drivers[number - 1]
        assert driver.executor.prepare_kv(other.executor.cache) == (driver is special)
        driver.length = other.length
        rows = 3 if number % 3 == 0 else 1
        drafts = {2: [wanted[len(tokens)], 0]} if rows == 3 and len(tokens) < 9 else None
        tokens += driver.decode([2], rows, drafts)[0][2]
    assert tokens[:9] == wanted
    # Only the last driver's cache is alive.
    executor = special.executor
    fresh = make_cache(executor.config, executor.sizes, "float32", executor.mesh)
    assert executor.prepare_kv(fresh)


def serve(executor, requests, *, joins=(), abort=None):
    """(texts, path of the decode steps, preemptions); one request may be aborted at a step."""
    engine = Engine(executor, executor.executor.config, executor.executor.decode_config)
    texts, step = {name: [] for name in requests}, 0
    joins = dict(zip(requests, joins, strict=False))
    while engine.has_work() or step <= max(joins.values(), default=0):
        for name, (prompt, count) in requests.items():
            if joins.get(name, 0) == step:
                params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
                engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
        if abort is not None and step == abort[0]:
            engine.abort(abort[1])
        for delta in engine.step():
            assert delta.error is None
            texts[delta.request_id] += delta.token_ids
        step += 1
    assert engine.allocator.in_use == 0
    stats = engine.stats()
    return texts, set(stats.steps) - {"stock/prefill"}, stats.preemptions


def check_company(stock, special):
    """Requests join, leave, are aborted and preempted; each text is that of the stock path."""
    vocabulary = stock.config.vocab_size
    random = np.random.default_rng(5)
    requests = {
        str(n): (random.integers(0, vocabulary, 3 + 9 * n).tolist(), 34 - 3 * n) for n in range(5)
    }
    whole = stock.sizes.pages
    wanted = {
        name: serve(FewPages(stock, whole), {name: request})[0][name]
        for name, request in requests.items()
    }
    executor = FewPages(special, 8)
    texts, paths, preemptions = serve(executor, requests, joins=(0, 0, 3, 6, 6), abort=(9, "1"))
    assert paths == {"specialized/"}
    assert preemptions > 0
    aborted = texts.pop("1")
    assert aborted == wanted.pop("1")[: len(aborted)]
    assert texts == wanted


def test_company_on_interpreted_kernels(small):
    check_company(*(driver.executor for driver in small))


def test_prefixes_on_interpreted_kernels(small):
    """A request goes on from what layer kernels have left pending, before rows that are refused."""
    stock, special = (driver.executor for driver in small)
    wanted = Conversations(engine_of(stock, caching=False), 1).run()
    stats = check_conversations(special, wanted)
    assert set(stats.steps) == {"stock/prefill", "specialized/"}


MODELS = ["k3-tiny-a", "whole-heavy"]


def compiled(golden, model, builds, **fields):
    """Drivers of (stock decode of one row, specialized decode of `builds`) on a GPU."""
    runs = (run_of("stock", builds=((1, 4),)), run_of("specialized", builds=builds, **fields))
    if model == "whole-heavy":
        config = made_config(golden, WHOLE_HEAVY, heads=8, inner=64)
        weights = made_weights(config, seed=1)
        return [drive(config, weights, run) for run in runs]
    config, mesh = K3Config.from_file(golden / model), make_mesh(1)
    params = load_params(golden / model, config, mesh)
    return [Driver(Executor(params, config, run, mesh)) for run in runs]


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(1, 2), (4, 8)])
@pytest.mark.parametrize("model", MODELS)
def test_compiled_kernels_give_the_stock_text(golden, model, widths):
    stock, special = compiled(golden, model, tuple((rows, 4) for rows in widths))
    specialized_steps(special)
    for case, found, wanted in both_texts(stock, special, widths):
        assert found == wanted, case


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_company_on_compiled_kernels(golden, model):
    """Also: the cache takes what memory is left."""
    drivers = compiled(golden, model, ((1, 1), (1, 4)), cache_memory=None)
    check_company(*(driver.executor for driver in drivers))
