"""Small models made up on the spot, and executors for them."""

from dataclasses import replace

import numpy as np
from driving import PAGE, Driver

from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.logical import logical_params
from k3jax.parallel import make_mesh
from k3jax.params import JAX_DTYPES, pack_params

CONTEXT = 128
WHOLE_HEAVY = ("kda", "kda", "kda", "mla", "kda", "kda")


def made_config(golden, mixers, *, block=3, heads=4, inner=32):
    """Kimi-K3 in small with these mixers; layer 0 is dense."""
    config = K3Config.from_file(golden / "k3-tiny-a")
    return replace(
        config,
        num_layers=len(mixers),
        mixers=tuple(mixers),
        ffns=("dense",) + ("moe",) * (len(mixers) - 1),
        attn_res_block=block,
        kda=replace(config.kda, num_heads=heads),
        mla=replace(config.mla, num_heads=heads),
        moe=replace(config.moe, inner=inner, shared_inner=inner),
    )


def made_weights(config, seed=0):
    """Logical arrays whose activations keep their size and whose texts do not repeat soon."""
    random = np.random.default_rng(seed)

    def make(name, spec):
        last = name.rpartition(".")[2]
        if spec.dtype == "u8":
            low, high = (119, 121) if last.endswith("_scale") else (0, 256)
            return random.integers(low, high, spec.shape, np.uint8)
        values = random.standard_normal(spec.shape, np.float32)
        if len(spec.shape) == 1:
            values = 1 + values / 8 if last.endswith("norm") else values / 2
        elif last != "embed":
            values *= spec.shape[-1] ** -0.5
        return values.astype(JAX_DTYPES[spec.dtype])

    return {name: make(name, spec) for name, spec in logical_params(config).items()}


def run_of(backend, *, builds, tp=1, **fields):
    requests = max(count for _, count in builds)
    return DecodeConfig(
        **{
            "dtype": "float32",
            "tp": tp,
            "decode_backend": backend,
            "max_requests": requests,
            "max_context": CONTEXT,
            "page_size": PAGE,
            "num_spec": max(rows for rows, _ in builds) - 1,
            "builds": builds,
            "prefill_buckets": ((1, 32),),
            "cache_memory": 1 << 28,  # enough; where it is left open, the largest steps are tried
            "prefix_cache": 0,  # a driver never goes on from a prefix
            **fields,
        }
    )


def drive(config, weights, run, **options):
    """A driver of a new executor; `weights` are logical."""
    mesh = make_mesh(run.tp)
    return Driver(Executor(pack_params(weights, config, mesh), config, run, mesh, **options))


def text_of(driver, prompt, count, *, rows=1, slot=1, drafter=None):
    """`count` greedy tokens; drafter(tokens so far) -> rows - 1 drafts."""
    return driver.greedy(slot, prompt, count, drafter=drafter, rows=rows, chunks=(32,))


def both_texts(stock, special, widths, *, seeds=3, tokens=32):
    """Yields (case, text of `special`, text of `stock`): greedy, every width and sort of drafts."""
    vocabulary = stock.executor.config.vocab_size
    for seed in range(seeds):
        prompt = np.random.default_rng(seed).integers(0, vocabulary, 9 + 40 * seed).tolist()
        wanted = text_of(stock, prompt, tokens)
        for rows in widths:
            choices = drafters(wanted, rows, vocabulary) if rows > 1 else {"none": None}
            for name, drafter in choices.items():
                found = text_of(special, prompt, tokens, rows=rows, slot=1 + seed, drafter=drafter)
                yield f"prompt {seed}, {rows} rows, drafts {name}", found, wanted


def drafters(wanted, rows, vocabulary):
    """All right, all wrong, mixed: each of its first tokens to its drafts."""

    def right(tokens):
        start = len(tokens)
        found = wanted[start : start + rows - 1]
        return found + [0] * (rows - 1 - len(found))

    def wrong(tokens):
        return [(token + 1) % vocabulary for token in right(tokens)]

    def mixed(tokens):
        cut = len(tokens) % rows
        return right(tokens)[:cut] + wrong(tokens)[cut:]

    return {"right": right, "wrong": wrong, "mixed": mixed}
