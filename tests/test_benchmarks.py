"""The benchmarks' commands without a GPU: rows as they come, failures passed over, a last line."""

import dataclasses
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command, last_line

from benchmarks import (
    acceptance,
    agreement,
    decode,
    dispatch,
    kernels,
    layer,
    layer_inputs,
    soak,
    timing,
)
from benchmarks.progress import Progress
from k3jax.lm import load
from k3jax.parallel import make_mesh
from k3jax.params import packed_shapes
from pallas_kernels import attn_res, route
from pallas_kernels.cases import CASES, select

BENCHMARKS = Path(timing.__file__).parent
PARTS = {
    "kernel": 6e-7,
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 2e-7,
    "psum_65_0_fusion_1": 2e-7,  # what XLA reduces by itself
}
TIMING = timing.Timing(2e-6, 1e-6, 1.0, PARTS, 4e-7, (2e-6,))
SMALL = [
    dataclasses.replace(select(op, "tiny")[0], tags=frozenset({"gpu", "tiny"}))
    for op in ("linear", "moe_mxfp4", "moe_mono", "kda_decode", "mla_decode")
]


@pytest.fixture
def clock(monkeypatch):
    """A GPU's clock that gives every program the same time, after a run."""

    def device_times(programs):
        for program in programs:
            program.run()
        return [TIMING] * len(programs)

    monkeypatch.setattr(timing, "ROTATION_BYTES", 1)
    monkeypatch.setattr(timing, "require_gpu", lambda: None)
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 4e12)
    monkeypatch.setattr(timing, "matrix_rate", lambda: 8e14)
    monkeypatch.setattr(timing, "device_times", device_times)


@pytest.fixture
def small_kernels(monkeypatch, clock):
    monkeypatch.setattr(kernels, "CASES", SMALL)
    monkeypatch.setattr(kernels, "IMPLS", ("reference", "reference"))
    monkeypatch.setattr(kernels, "TOGETHER", 2)


def test_kernels_are_timed_without_their_references(monkeypatch, capsys, small_kernels):
    arguments = ("--tags", "tiny", "--case", "^linear", "--no-xla")
    assert command(monkeypatch, kernels, *arguments) == 0
    _, record = last_line(capsys)
    assert [case["peers_us"] for case in record["cases"]] == [{}]


@pytest.mark.parametrize("module", [kernels, layer])
def test_without_a_gpu_nothing_large_is_made(monkeypatch, module):
    with pytest.raises(NotImplementedError, match="JAX runs on a cpu here"):
        command(monkeypatch, module)


def test_kernels_are_timed_case_by_case(monkeypatch, capsys, small_kernels):
    assert command(monkeypatch, kernels, "--tags", "tiny") == 0
    rows, record = last_line(capsys)
    assert [case["name"] for case in record["cases"]] == [str(case) for case in SMALL]
    assert [row.split()[0] for row in rows[1:]] == [str(case) for case in SMALL]
    assert record["failed"] == record["left"] == []
    for case in record["cases"]:
        assert (case["us"], case["spread_us"]) == pytest.approx((2.0, 0.4))
        assert case["peers_us"] == {"xla": pytest.approx(2.0)}
        assert case["parts_us"]["kernel"] == pytest.approx(0.6)
        assert 0 < case["bytes"] < 1 << 20


def test_the_layers_of_a_step_share_its_plan_and_its_words():
    """As in the model: slots are looked up once, and flags and health words are ORed."""
    case = select("kda_decode", "tiny")[0]
    own = dataclasses.replace(kernels.make_sets(case), sets=kernels.make_sets(case).sets[:3])
    assert {"slots", "starts", "accepted"} == own.plan.keys()
    program = kernels.build((case, "reference", own))
    ((rest, words),) = program.run()
    assert len(rest) == 3
    flags, health = words
    assert (flags.dtype, flags.ndim, health.dtype, health.ndim) == (jnp.bool_, 1, jnp.uint32, 0)


def test_a_kernel_that_fails_is_named_and_the_others_are_timed(monkeypatch, capsys, small_kernels):
    bind = kernels.bind

    def broken(case, impl):
        if case.op == "moe_mxfp4":
            raise TypeError("no such thing\nat all")
        return bind(case, impl)

    monkeypatch.setattr(kernels, "bind", broken)
    assert command(monkeypatch, kernels, "--tags", "tiny") == 1
    rows, record = last_line(capsys)
    assert record["failed"] == [str(SMALL[1])]
    assert len(record["cases"]) == len(SMALL) - 1
    assert any("FAILED: TypeError: no such thing" in row for row in rows)


def test_kernels_that_a_trace_does_not_show_are_timed_alone(monkeypatch, capsys, small_kernels):
    def device_times(programs):
        if len(programs) != 1:
            raise RuntimeError("the trace shows 0 runs of 20")
        return [TIMING]

    monkeypatch.setattr(timing, "device_times", device_times)
    assert command(monkeypatch, kernels, "--tags", "tiny", "--case", "linear") == 0
    rows, record = last_line(capsys)
    assert len(record["cases"]) == 1
    assert any("2 programs are timed again, one by one" in row for row in rows)


def test_kernels_stop_in_time(monkeypatch, capsys, small_kernels):
    assert command(monkeypatch, kernels, "--tags", "tiny", "--minutes", "0") == 1
    _, record = last_line(capsys)
    assert record["left"] == [str(case) for case in SMALL]


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        (kernels, "--tags k3-tp3", "no case has the tags"),
        (layer, "--kinds dense", "invalid choice: 'dense'"),
        (layer, "--widths 3", "invalid choice: 3"),
        (layer, "--contexts 4096", "must hold a chunk of 8192 tokens"),
        (layer, "--tp 3", "invalid choice: 3"),
        (dispatch, "--steps 10", "must be above 10"),
        (soak, "--pauses 1", "must be 2 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(monkeypatch, capsys, module, arguments, said):
    with pytest.raises(SystemExit):
        command(monkeypatch, module, *arguments.split())
    assert said in capsys.readouterr().err


def small_rank(mixers, ranks=1):
    config = dispatch.thin_config(len(mixers))
    return dataclasses.replace(
        config,
        mixers=tuple(mixers),
        ffns=("moe",) * len(mixers),
        kda=dataclasses.replace(config.kda, num_heads=2 * ranks),
        mla=dataclasses.replace(config.mla, num_heads=2 * ranks),
        moe=dataclasses.replace(config.moe, inner=32 * ranks, shared_inner=32 * ranks),
    )


@pytest.fixture
def small_layers(monkeypatch, clock):
    monkeypatch.setattr(layer, "rank_config", small_rank)
    monkeypatch.setattr(layer, "KINDS", {"ffn": ("mla",) * layer.LAYERS})
    monkeypatch.setattr(layer, "CONTEXT", 32)
    monkeypatch.setattr(layer, "CHUNK", 16)


def test_layers_are_timed_width_by_width(capsys, small_layers):
    """Compiled kernels fail on a CPU: they are named, and what runs everywhere has its rows."""
    progress = Progress()
    cases = layer.decode_cases("ffn", ["pallas", "reference", "interpret"], [1], 1)
    [record] = layer.report_decode(cases, 4e12, True, progress)
    rows = capsys.readouterr().out.splitlines()
    assert record["us"] == record["stock_us"] == pytest.approx(2.0 / layer.LAYERS)
    assert progress.failed == ["ffn  1 rows (1 x 1) at TP 1 by pallas"]
    assert "stock 0.5 us" in rows[1]
    assert rows[2].endswith("kernel")
    [record] = layer.report_prefill([32], "reference", 1, True, progress)
    assert capsys.readouterr().out.splitlines()[1].endswith("kernel")
    assert record["tokens_per_second"] == pytest.approx(8e6)


def test_layers_of_several_ranks_stand_beside_those_of_one(monkeypatch, capsys, small_layers):
    """Each rank holds what the one holds, whatever their number."""
    progress, seen = Progress(), []

    def device_times(programs):
        [program] = programs
        leaves = jax.tree.leaves((program.states, program.others))
        parts = [{shard.device: shard.data.shape for shard in x.addressable_shards} for x in leaves]
        seen.append([set(own.values()) for own in parts])
        ranks = max(map(len, parts))
        text = program.compiled.as_text()
        assert text.count(" all-reduce(") == (2 * layer.LAYERS if ranks == 2 else 0)
        assert " all-gather(" not in text
        program.run()
        seconds = tuple(2e-6 * (1 + rank) for rank in range(ranks))
        return [dataclasses.replace(TIMING, seconds=seconds[-1], by_device=seconds)]

    monkeypatch.setattr(timing, "device_times", device_times)
    cases = layer.decode_cases("ffn", ["interpret"], [1], 2)
    one, two = layer.report_decode(cases, 4e12, False, progress)
    assert progress.status == 0
    assert seen[0] == seen[1]
    assert (one["tp"], two["tp"]) == (1, 2)
    assert two["tp1_us"] == one["us"] == pytest.approx(0.5)
    assert two["us_by_device"] == pytest.approx([0.5, 1.0])
    assert two["megabytes"] == one["megabytes"]
    assert two["percent"] == pytest.approx(one["percent"] / 2)
    assert two["reductions_us"] == pytest.approx(0.1)
    assert "+0.5 us over TP 1  reductions 0.1 us" in capsys.readouterr().out.splitlines()[1]
    rows = list(layer.report_prefill([16], "reference", 2, False, progress))
    assert [row["tp"] for row in rows] == [1, 2]
    assert progress.status == 0


def many_experts(rows):
    """A case of layers whose rows leave many experts alone, and its weights."""
    config = small_rank(("kda", "mla", "kda", "mla"))
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, num_experts=64))
    case = layer.Case("", config, "reference", "decode", 1, rows, 32 - rows)
    return case, layer.make_params(config, make_mesh(1), 1000)


def test_the_experts_that_are_counted_are_those_that_are_needed(monkeypatch):
    """The result does not change when all others are NaN, and does when one of them is."""
    case, params = many_experts(8)
    [(residual, _, _, chosen)] = case.compile(params, tracing=True).run()
    needed = [np.unique(np.asarray(experts)) for experts in chosen]

    def out_without(lost):
        for weights, experts in zip(params, lost, strict=True):
            scale = weights["ffn"]["w2_scale"]
            weights["ffn"]["w2_scale"] = scale.at[experts].set(255)  # NaN by the format
        [(changed, *_, traced)] = case.compile(params).run()
        assert traced == []  # what is timed is what a step runs
        return np.asarray(changed.delta)

    others = [np.setdiff1d(np.arange(64), experts) for experts in needed]
    assert all(len(experts) > 10 for experts in (*others, *needed))
    np.testing.assert_array_equal(out_without(others), residual.delta)
    assert np.isnan(out_without([*others[:3], needed[3][:1]])).any()
    monkeypatch.setattr(timing, "device_times", lambda programs: [TIMING])  # without a run
    [measured] = layer.measure([case], Progress())
    assert measured.experts == [len(experts) for experts in needed]


def test_bytes_of_a_layer_are_those_of_the_experts_that_were_chosen(monkeypatch, clock):
    monkeypatch.setattr(layer, "rank_config", lambda mixers: case.config)
    case, _ = many_experts(8)
    expert = 3 * 32 * 64 // 2 + 3 * 32 * 64 // 32  # codes and scales
    few, more = (
        layer.decode_record(layer.Measured(case, TIMING, experts), 4e12)
        for experts in ([20, 20, 20, 20], [20, 24, 20, 20])
    )
    assert more["megabytes"] - few["megabytes"] == pytest.approx(expert / 1e6)
    assert more["percent"] / few["percent"] == pytest.approx(more["megabytes"] / few["megabytes"])


def test_rows_choose_experts_as_at_random():
    """Rows and router of real size: 16 of 896 experts for each of 8 and of 16 rows."""
    config = layer.rank_config(("kda",))
    [shapes] = packed_shapes(config, 1)["layers"].values()
    shape = shapes["ffn"]["router"]
    router = layer_inputs.noise(shape.shape, shape.dtype, True, jnp.uint32(1006))
    one = jnp.ones(config.hidden_size, jnp.bfloat16)
    bias = jnp.zeros(896, jnp.float32)
    options = {"top_k": 16, "scaling": 1.0, "renormalize": True, "impl": "reference"}
    for rows in (8, 16):
        residual = layer.make_residual(config, rows)
        x, _ = attn_res(
            residual.blocks,
            residual.count,
            residual.part,
            one,
            one,
            one,
            delta=residual.delta,
            eps=1e-5,
            impl="reference",
        )
        experts, _ = route(x, router, bias, **options)
        expected = 896 * (1 - (1 - 16 / 896) ** rows)
        assert len(np.unique(np.asarray(experts))) == pytest.approx(expected, rel=0.06)


def test_a_rank_of_several_has_its_weights_and_no_others():
    """As a rank of Kimi-K3 at TP 8; weights are the same in every run."""
    config, mesh = small_rank(("kda", "mla"), 4), make_mesh(4)
    params = layer.make_params(config, mesh, 1000)
    own = jax.tree.map(lambda leaf: leaf.addressable_shards[2].data, params)
    wanted = packed_shapes(small_rank(("kda", "mla")), 1)["layers"]
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, [wanted[0], wanted[1]])
    again = layer.make_params(config, mesh, 1000)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    whole = layer.rank_config(("kda",), 8)
    assert (whole.kda.num_heads, whole.moe.inner) == (96, 3072)


def test_a_text_without_a_step_is_named_and_the_others_are_measured(monkeypatch, capsys, tmp_path):
    (tmp_path / "long").write_text("one two three " * 40)
    (tmp_path / "short").write_text("one")
    names = [str(tmp_path / name) for name in ("short", "missing", "long")]
    assert command(monkeypatch, acceptance, *names, "--prompt", "8", "--num-spec", "3") == 1
    rows, record = last_line(capsys)
    assert record["failed"] == names[:2]
    assert record["results"][names[2]][0]["tokens_per_step"] > 2
    assert "ValueError" in rows[0]
    assert "FileNotFoundError" in rows[1]


def test_tokens_per_second_are_those_of_whole_answers(monkeypatch, capsys):
    """k3-tiny, really: what it cannot answer has no rate."""
    flags = ["--tokens=4", "--prompt-tokens=4", "--repeats=1", "--dtype=float32"]
    refused = []

    def add(self, request, matcher=None):
        if refused and request.request_id == "1":
            raise ValueError("not this one")
        return whole(self, request, matcher)

    whole = decode.Engine.add
    monkeypatch.setattr(decode.Engine, "add", add)
    monkeypatch.setattr(decode, "step_bytes", lambda *sizes: refused.append(True) or 1e6)
    assert command(monkeypatch, decode, *flags, "--concurrency", "1", "2") == 1
    rows, record = last_line(capsys)
    [result] = record["results"]
    assert result["concurrency"] == 1
    assert result["tokens_per_second"] > 0
    assert 0 < result["tokens_per_step"] <= 1
    assert record["failed"] == ["2 requests"]
    assert "ValueError: not this one" in rows[-1]


def test_layers_of_a_rank_are_served_like_a_model(monkeypatch, capsys):
    """--rank-layers, of a width that a CPU has time for."""
    monkeypatch.setattr(decode, "rank_config", lambda mixers: dispatch.thin_config(len(mixers)))
    flags = ["--rank-layers=4", "--tokens=4", "--prompt-tokens=4", "--repeats=1"]
    assert command(monkeypatch, decode, *flags, "--dtype=float32", "--concurrency=1") == 0
    _, record = last_line(capsys)
    [result] = record["results"]
    assert result["tokens_per_step"] == 1
    assert result["tokens_per_second"] > 0


def test_paths_that_differ_in_a_token_go_on_alike(monkeypatch):
    """What is compared has the same tokens before it, and closeness is the stock path's."""
    stock = load("checkpoints/k3-tiny", dtype="float32", decode_backend="stock", max_context=64)
    prompt = [5, 6, 7, 8]
    said = stock.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)

    class Contrary:
        def generate(self, ids, **wishes):
            tokens = stock.generate(ids, **wishes)
            return [tokens[0], 1 + tokens[1], *tokens[2:]] if len(ids) < 7 else tokens

    found = list(agreement.differences(stock, Contrary(), [prompt], 8))
    assert [(each.place, each.stock, each.specialized) for each in found] == [
        (place, said[place], 1 + said[place]) for place in (1, 3)
    ]
    first, second = np.sort(stock.logits([*prompt, said[0]])[-1])[[-1, -2]]
    exponent = np.frexp(first)[1]
    assert found[0].logits == pytest.approx((first - second) / 2.0 ** (exponent - 8), rel=1e-4)
    assert all(each.router > 0 for each in found)
    assert agreement.places(2.0**-8, 1.5) == 0.5
    assert agreement.places(2.0**-6, -4.1) == 0.5


@pytest.mark.parametrize("script", kernels.PEERS)
def test_peers_name_cases_that_exist(monkeypatch, capsys, script):
    """Each time of a peer stands beside a case of ours; torch is not there, nor are the peers."""
    monkeypatch.setattr(sys, "argv", [script])
    main = runpy.run_path(str(BENCHMARKS / script), run_name="peer")["main"]
    main.__globals__.update(
        chunk_kda=None,
        fused_recurrent_kda=None,
        graph_time=lambda *arguments: 5.0,
        make_bank=dict,
        measure=lambda rows, bank: {"whole_us": 5.0, "products_us": 4.0},
    )
    assert main() == 0
    _, times = last_line(capsys)
    named = {name for cases in times.values() for name in cases}
    assert named
    assert named <= {str(case) for case in CASES if "gpu" in case.tags}
    assert {time for cases in times.values() for time in cases.values()} <= {4.0, 5.0}


def test_peers_that_fail_are_shown_and_passed_over(monkeypatch, capsys):
    said = {
        "peers_kda.py": (0, ["1.0 s", '{"fla": {"a": 5.0}}', "a warning on the way out"]),
        "peers_moe.py": (1, ["skipped: No module named 'int4_b32'"]),
    }
    monkeypatch.setattr(kernels, "run_peer", lambda run, progress: said[Path(run[1]).name])
    assert kernels.outside_peers("python", Progress()) == {"a": {"fla": 5.0}}
    rows = capsys.readouterr().out.splitlines()
    assert rows == [
        "peers_moe.py: not all measured (status=1); it said at last",
        "    skipped: No module named 'int4_b32'",
    ]


def test_a_peer_is_heard_out_and_ended_in_time():
    talk = "import sys, time; print('one', flush=True); sys.stderr.write('two\\n')"
    assert kernels.run_peer([sys.executable, "-c", talk], Progress()) == (0, ["one", "two"])
    slow = f"{talk}; time.sleep(60)"
    status, said = kernels.run_peer([sys.executable, "-c", slow], Progress(0.05))
    assert (status, said) == (None, ["one", "two"])
