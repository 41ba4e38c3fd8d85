"""Training at a toy's size: the decoder's own logits, exact resumption, exact export."""

import itertools
import json
import time
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.recipe import export, train
from checkpoints.recipe import forward as training
from checkpoints.recipe.arrays import Split
from checkpoints.recipe.batches import GAP, Batch, Cursor, Stream, fill, held_rows
from checkpoints.recipe.forward import Rows, abstract_training_decoder, as_stored, forward
from checkpoints.recipe.model import BUDGETS, SHAPES, model_config, raw_config
from checkpoints.recipe.optimize import Schedule, make_optimizer, moved_bias
from checkpoints.recipe.saved import read_log
from checkpoints.recipe.start import start_params
from checkpoints.recipe.step import Metrics, fresh_state, make_step, split_bias
from k3jax import convert, lm
from k3jax.checkpoint import open_checkpoint
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.kinds import layer_kinds
from k3jax.logical import group_params, groups, logical_params
from k3jax.parallel import make_mesh
from k3jax.params import pack_params
from k3jax.sizes import bytes_at_rest

TOY = replace(
    SHAPES["k3-nano"],
    layers="KM",
    block=1,
    hidden=64,
    kda_heads=2,
    kda_dim=32,
    mla_heads=2,
    q_lora=32,
    kv_lora=32,
    nope=32,
    rope=16,
    value=32,
    dense_inner=64,
    experts=4,
    top_k=2,
    latent=32,
    expert_inner=32,
)
RUN = train.Run(
    "toy",
    steps=30,
    dtype="float32",
    length=64,
    code_rows=2,
    chat_rows=2,
    warmup=3,
    judge_every=15,
    judge_rows=4,
)


@pytest.fixture(scope="module")
def config():
    return K3Config.from_dict(raw_config(TOY))


def documents(seed, count):
    """Documents of the form x, x + 1, x + 2, ...: easy to learn; every fifth token weighs 0."""
    rng = np.random.default_rng(seed)
    parts = [(rng.integers(0, 50) + np.arange(rng.integers(10, 150))) % 50 for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])[:-1]])
    tokens = np.concatenate(parts).astype(np.uint16)
    weights = (np.arange(len(tokens)) % 5 != 0).astype(np.uint8)
    return Split(tokens, weights, starts, np.array([len(part) for part in parts]))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("code_train", "chat_train", "code_held", "chat_held")):
        documents(seed, 60).save(directory / f"{name}.npz")
    return directory


def test_configs_fit_their_budgets_and_the_kernels():
    for name, shape in SHAPES.items():
        config = model_config(name)
        assert bytes_at_rest(config) < 0.97 * BUDGETS[name]
        assert config.mixers[-1] == "mla"
        assert config.attn_res_blocks >= 2
        kinds = layer_kinds(config)
        assert kinds[0] == "stock"
        assert set(kinds[1:]) == {"whole", "ffn"}
        for size in (shape.hidden, shape.latent, shape.expert_inner, shape.kda_dim, shape.kv_lora):
            assert size & (size - 1) == 0, (name, size)


def test_a_batch_has_every_token_once_and_its_successor():
    split = documents(5, 40)
    stream = Stream(split, 64, seed=3)
    batch = fill(split, stream.rows, 64)
    np.testing.assert_array_equal(
        np.sort(batch.tokens[batch.valid]), np.sort(split.tokens.astype(np.int32))
    )
    counts = batch.weights > 0
    assert counts.sum() == split.weights.sum() - split.weights[split.starts].sum()
    np.testing.assert_array_equal(batch.targets[counts], (batch.tokens[counts] + 1) % 50)
    starts = np.flatnonzero(batch.first[0])
    assert all(not batch.valid[0, at - GAP : at].any() for at in starts if at)
    again = Stream(split, 64, 3, Cursor(stream.cursor.epoch, 1)).take(3)
    stream.take(1)
    assert stream.take(3) == again


def test_schedule():
    schedule = Schedule(10, 0.4)
    rates = [float(schedule(step, 100)) for step in (0, 9, 30, 60, 80, 100)]
    np.testing.assert_allclose(rates, [0.1, 1.0, 1.0, 1.0, 0.5, 0.0], rtol=1e-6)
    assert float(schedule(9, train.UNKNOWN_STEPS)) == 1.0


def test_the_bias_moves_against_the_load():
    moved = moved_bias(jnp.zeros(3), jnp.array([5.0, 1.0, 3.0]), jnp.float32(0.25))
    np.testing.assert_array_equal(np.asarray(moved), [-0.25, 0.25, 0.0])


def test_products_are_of_one_dtype(config):
    """Of bfloat16 but in the recurrence and the optimizer, backward too: none is raised halfway."""
    params = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, start_params(config, 0)))
    moved, _ = split_bias(params)
    optimizer = make_optimizer(moved, rate=0.1, adam_rate=0.1, decay=0.1, clip=1.0)
    state = jax.eval_shape(lambda params: fresh_state(params, optimizer), params)
    batch = fill(documents(5, 40), [[]] * 2, 64)
    step = make_step(config, "bfloat16", optimizer, RUN.schedule, seed=0, bias_rate=0.1)
    found = step.trace(state, batch, jnp.zeros(2), jnp.int32(9)).jaxpr
    kinds = Counter(
        tuple(operand.aval.dtype.name for operand in equation.invars)
        for equation in equations(found.jaxpr)
        if equation.primitive.name == "dot_general"
    )
    assert set(kinds) == {("bfloat16", "bfloat16"), ("float32", "float32")}


def equations(jaxpr):
    """All of a jaxpr, those of its loops and calls too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_logits_are_the_decoders(config, monkeypatch):
    """Float32, MXFP4 experts; documents that share a row, and chunks of the recurrence."""
    monkeypatch.setattr(training, "ATTENDED", 24)
    rng = np.random.default_rng(0)
    params = start_params(config, 0)
    for value in params.values():
        if value.ndim == 1:
            value += rng.normal(0, 0.2, value.shape).astype(np.float32)
    params = {name: 2 * value if value.ndim > 1 else value for name, value in params.items()}
    tokens = rng.integers(0, config.vocab_size, (2, 64)).astype(np.int32)
    first, valid = np.zeros((2, 64), bool), np.ones((2, 64), bool)
    first[:, 0] = first[1, 40] = True
    valid[1, 40 - GAP : 40] = False
    rows = Rows(*map(jnp.asarray, (tokens, first, valid)))
    graph = abstract_training_decoder(config, "float32")
    run = jax.jit(lambda params: forward(graph, as_stored(params, config), rows)[0])
    found = np.asarray(run(params)).reshape(2, 64, -1)

    mesh = make_mesh(1)
    packed = pack_params(export.stored(params, config), config, mesh)
    serving = DecodeConfig(dtype="float32", max_context=64, max_requests=1)
    model = lm.LanguageModel(packed, config, serving, mesh)
    for row, start, stop in ((0, 0, 64), (1, 0, 40 - GAP), (1, 40, 64)):
        wanted = model.logits(tokens[row, start:stop].tolist())
        difference = np.linalg.norm(found[row, start:stop] - wanted) / np.linalg.norm(wanted)
        assert difference < 3e-5, (row, start, difference)


@pytest.fixture(scope="module")
def whole(config, data, tmp_path_factory):
    """A run of all 30 steps, with its directory and its state after 6 steps."""
    out = tmp_path_factory.mktemp("whole")
    trainer = train.Trainer(RUN, data, out, config, resume=False)
    assert not train.train(trainer, time.monotonic() + 600, stop_after=6)
    early = jax.device_get(trainer.state)
    assert train.train(trainer, time.monotonic() + 600)
    return trainer, early, out


def test_a_killed_run_goes_on_bit_by_bit_from_its_last_line(whole, config, data, tmp_path):
    trainer = train.Trainer(replace(RUN, judge_every=3), data, tmp_path, config, resume=False)
    assert not train.train(trainer, time.monotonic() - 1)
    assert trainer.done == 0  # time was up
    assert (tmp_path / "state.npz").is_file()
    take = trainer.batch
    trainer.batch = lambda: take() if trainer.done < 5 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        train.train(trainer, time.monotonic() + 600)
    resumed = train.Trainer(RUN, data, tmp_path, config, resume=True)
    assert resumed.done == 3
    assert [line["step"] for line in read_log(tmp_path / "log.csv")] == ["3"]
    assert not train.train(resumed, time.monotonic() + 600, stop_after=6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), whole[1])


def test_the_pace_of_the_first_steps_chooses_how_many(whole, config, data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "FITTED", 3)
    run = replace(RUN, steps=None, train_minutes=0.0)
    trainer = train.Trainer(run, data, tmp_path, config, resume=False)
    assert train.train(trainer, time.monotonic() + 600)
    assert trainer.done == 6
    kept = json.loads((tmp_path / "run.json").read_text())
    assert train.Run(**kept) == replace(run, steps=6)
    assert set(json.loads((tmp_path / "final.json").read_text())) == {"code", "chat"}


def test_a_run_whose_gradients_stay_broken_ends(whole):
    trainer = whole[0]
    broken = Metrics(np.ones(4), np.ones(4), np.float32("nan"), np.ones((1, 4)), np.True_)
    pace = train.Pace(0)
    train.report(trainer, pace, 20, broken)
    train.report(trainer, pace, 40, replace(broken, skipped=np.False_))
    train.report(trainer, pace, 60, broken)
    with pytest.raises(RuntimeError, match="step 80: no finite gradient again; step 30 is saved"):
        train.report(trainer, pace, 80, broken)


def test_a_run_is_neither_begun_over_another_nor_changed(tmp_path):
    def chosen(*arguments):
        return train.chosen_run(train.parse(["--data", "x", "--out", str(tmp_path), *arguments]))

    with pytest.raises(SystemExit, match="either --steps or --train-minutes"):
        chosen()
    with pytest.raises(SystemExit, match="leave --resume out"):
        chosen("--resume")
    run = chosen("--steps", "5", "--rate", "0.1")
    assert run == train.Run(steps=5, rate=0.1)
    (tmp_path / "state.npz").touch()
    with pytest.raises(SystemExit, match="go on with --resume"):
        chosen("--steps", "5")
    with pytest.raises(SystemExit, match=r"but got \{'rate': 0.2\}"):
        chosen("--resume", "--steps", "5", "--rate", "0.2")
    assert chosen("--resume", "--steps", "5") == run


def test_tokens_that_the_model_has_not_are_refused(data):
    file = data / "code_held.npz"
    assert train.known_tokens(file, 50).tokens.max() == 49
    with pytest.raises(ValueError, match=r"code_held.npz has token 49, and the model only 49"):
        train.known_tokens(file, 49)


def test_losses_fall(whole):
    trainer, _, out = whole
    lines = read_log(out / "log.csv")
    assert [line["step"] for line in lines] == ["6", "15", "30"]
    assert float(lines[-1]["held_code"]) < 0.6 * float(lines[0]["held_code"])
    assert float(lines[-1]["held_chat"]) < 0.6 * float(lines[0]["held_chat"])
    assert all(float(line["skipped"]) == 0 for line in lines)
    assert all(abs(value).max() > 0 for value in jax.device_get(trainer.state.bias).values())


def test_the_export_is_what_was_trained(whole, config, data, tmp_path, monkeypatch):
    """One file, a checkpoint and the Hugging Face layout, bit for bit; and their loss."""
    trainer, _, out = whole
    monkeypatch.setitem(SHAPES, "toy", TOY)
    (out / "run.json").write_text('{"model": "toy"}')
    assert export.main([str(out), str(tmp_path / "toy.safetensors")]) == 0
    assert export.main([str(tmp_path / "toy.safetensors"), str(tmp_path / "toy")]) == 0
    convert.convert(tmp_path / "toy", tmp_path / "hf", "hf", lambda group, size: None)
    params = jax.device_get(trainer.state.params | trainer.state.bias)
    wanted = export.stored(params, config)
    for directory in (tmp_path / "toy", tmp_path / "hf"):
        with open_checkpoint(directory, config) as opened:
            for group in groups(config):
                for name in group_params(config, group):
                    full = name if group == "ends" else f"{group}.{name}"
                    np.testing.assert_array_equal(opened.read(group, name), wanted[full])
    assert set(wanted) == set(logical_params(config))

    model = lm.load(tmp_path / "toy", dtype="float32")
    rows = held_rows(documents(2, 60), RUN.length, 1)
    nll, _ = trainer.judge(trainer.state.params, trainer.state.bias, four(rows))
    total = 0.0
    bounds = [*np.flatnonzero(rows.first[0]), RUN.length]
    for start, stop in itertools.pairwise(bounds):
        ids = rows.tokens[0, start:stop][rows.valid[0, start:stop]]
        logits = jnp.asarray(model.logits(ids.tolist()))
        scores = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        here = slice(start, start + len(ids))
        own = scores[np.arange(len(ids)), rows.targets[0, here]]
        total -= float((own * rows.weights[0, here]).sum())
    assert abs(total / float(nll[0]) - 1) < 1e-4


def four(batch):
    """The first row of a batch, and three empty ones."""
    return Batch(*(train.padded(leaf[:1], 4) for leaf in batch))
