"""Logits to tokens on the device: penalties, cut-offs, seeded noise, acceptance of drafts; pure.

Shape letters: B requests, T rows of one request, V vocabulary, S slots (slot 0 is the null slot).
A sampled token is a function of its row's logits, the request's parameters and history, and the
pair (seed, position) alone, so neither company, nor sharding, nor speculation changes a text.
What few requests want is chosen by a condition, so a change of wishes never recompiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, SamplingParams

Array = Any  # numpy on the host, jax on the device

STOP_IDS = MAX_STOP_IDS + 8  # a request's own and the model's
_COLDEST = 1e-6  # a positive temperature below this would overflow the division
_BLOCK = 128  # tokens of which at most one decides whether the others can be among the likeliest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRow:
    """What one request asks of the sampler; stacked over slots, every leaf has a leading S."""

    temperature: Array  # f32[]; 0 is greedy
    top_p: Array  # f32[]
    min_p: Array  # f32[]
    presence: Array  # f32[]
    frequency: Array  # f32[]
    repetition: Array  # f32[]
    top_k: Array  # i32[]; 0: off
    seed: Array  # u32[]
    bias_ids: Array  # i32[MAX_LOGIT_BIAS]; -1: none; filled from the front
    bias_values: Array  # f32[MAX_LOGIT_BIAS]
    stop_ids: Array  # i32[STOP_IDS]; -1: none
    stop_from: Array  # i32[]; the first position where a stop token may stand
    logprobs: Array  # i32[]; -1: none
    prompt_logprobs: Array  # i32[]; -1: none


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Every slot's wishes and the tokens it has met."""

    rows: SamplingRow  # leaves [S, ...]
    counts: Array  # i32[S, V]; times each token was generated
    seen: Array  # bool[S, V]; stands in the prompt or was generated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The tokens of a step; only the first `count` rows of a request are emitted."""

    tokens: Array  # i32[B, T]
    count: Array  # i32[B]; 1 + the leading drafts that equal the sampled token
    logprobs: Array  # f32[B, T]; zero unless some request wants log probabilities
    top_ids: Array  # i32[B, T, MAX_LOGPROBS]
    top_logprobs: Array  # f32[B, T, MAX_LOGPROBS]
    nonfinite: Array  # bool[B]; NaN or infinity in an emitted row


def sampling_row(
    params: SamplingParams, stop_ids: Sequence[int], prompt_length: int, seed: int
) -> SamplingRow:
    """One request's wishes as numpy arrays; `seed` of up to 64 bits is folded into 32.

    Raises ValueError if there are more than STOP_IDS stop ids.
    """
    if len(stop_ids) > STOP_IDS:
        raise ValueError(f"at most {STOP_IDS} stop ids fit a request, got {len(stop_ids)}")
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
    bias_values[: len(params.logit_bias)] = list(params.logit_bias.values())
    stops = np.full(STOP_IDS, -1, np.int32)
    stops[: len(stop_ids)] = stop_ids
    return SamplingRow(
        temperature=np.float32(params.temperature),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        presence=np.float32(params.presence_penalty),
        frequency=np.float32(params.frequency_penalty),
        repetition=np.float32(params.repetition_penalty),
        top_k=np.int32(max(params.top_k, 0)),
        seed=np.uint32((seed ^ ((seed >> 32) * 0x9E3779B1)) & 0xFFFFFFFF),
        bias_ids=bias_ids,
        bias_values=bias_values,
        stop_ids=stops,
        stop_from=np.int32(prompt_length + params.min_tokens),
        logprobs=np.int32(-1 if params.logprobs is None else params.logprobs),
        prompt_logprobs=np.int32(-1 if params.prompt_logprobs is None else params.prompt_logprobs),
    )


def make_sampling_state(slots: int, vocab: int) -> SamplingState:
    """A state of `slots` greedy slots that have met no token."""
    neutral = sampling_row(SamplingParams(temperature=0.0), (), 0, 0)
    return SamplingState(
        rows=jax.tree.map(lambda leaf: jnp.tile(leaf, (slots,) + (1,) * leaf.ndim), neutral),
        counts=jnp.zeros((slots, vocab), jnp.int32),
        seen=jnp.zeros((slots, vocab), jnp.bool_),
    )


def reset_slot(state: SamplingState, slot: Array, row: SamplingRow) -> SamplingState:
    """The state with `slot` (i32[]) given to a new request that has met no token."""
    return SamplingState(
        rows=jax.tree.map(lambda table, leaf: table.at[slot].set(leaf), state.rows, row),
        counts=state.counts.at[slot].set(0),
        seen=state.seen.at[slot].set(False),
    )


def observe(
    state: SamplingState, slots: Array, tokens: Array, valid: Array, generated: Array
) -> SamplingState:
    """The state after the requests met tokens i32[B, T], where valid bool[B, T].

    slots i32[B]; the null slot (<= 0) meets nothing. generated bool[B, T]: the token is not part
    of the prompt, so the penalties of OpenAI count it.
    """
    vocab = state.counts.shape[1]
    tokens = jnp.where(valid & (slots > 0)[:, None], tokens, vocab)
    slots = jnp.broadcast_to(slots[:, None], tokens.shape)
    counts = state.counts.at[slots, tokens].add(generated.astype(jnp.int32), mode="drop")
    return SamplingState(state.rows, counts, state.seen.at[slots, tokens].set(True, mode="drop"))


def sample(
    logits: Array,  # f32[B, T, V]
    state: SamplingState,
    slots: Array,  # i32[B]
    drafts: Array | None,  # i32[B, T-1]; -1: none
    positions: Array,  # i32[B, T]; of the rows that gave the logits
    bitmask: Array | None = None,  # u32[B, T, ceil(V / 32)]; a set bit allows the token
) -> Sampled:
    """The next token of every row and how many of the rows are emitted.

    In this order: repetition, frequency and presence penalty, logit bias, ban of stop tokens,
    grammar; then the argmax (lowest id on ties) or temperature, min_p, top_k, top_p and the
    argmax of logits plus Gumbel noise. Row t is penalized for the drafts before it. A row with
    a NaN or infinite logit gives token 0 and sets its request's flag.
    """
    slots = jnp.maximum(slots, 0)
    small = jax.tree.map(lambda table: table[slots], _scalars(state.rows))
    raw = logits
    logits = _adjust(logits, state, slots, drafts, positions)
    if bitmask is not None:
        logits = jnp.where(_unpack(bitmask, logits.shape[-1]), logits, -jnp.inf)
    tokens = _choose(logits, small, positions)
    bad = ~jnp.isfinite(raw).all(axis=-1)
    tokens = jnp.where(bad, 0, tokens)
    count = jnp.ones(slots.shape, jnp.int32)
    if drafts is not None:
        accepted = (drafts >= 0) & (drafts == tokens[:, :-1])
        count = count + jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
    wanted = (small["logprobs"] >= 0).any()
    logprob, top_ids, top_logprobs = _choice(wanted, _logprobs, _no_logprobs, raw, tokens)
    emitted = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < count[:, None]
    nonfinite = (bad & emitted).any(axis=1) & (slots > 0)
    return Sampled(tokens, count, logprob, top_ids, top_logprobs, nonfinite)


def prompt_logprobs(logits: Array, next_tokens: Array) -> tuple[Array, Array, Array]:
    """Log probabilities of the prompt's own tokens.

    logits f32[B, T, V], next_tokens i32[B, T] -> (f32[B, T], top ids i32[B, T, MAX_LOGPROBS], their
    log probabilities f32[B, T, MAX_LOGPROBS]). Rows whose next token is unknown (-1) mean nothing.
    """
    return _logprobs(logits, jnp.maximum(next_tokens, 0))


def _scalars(rows: SamplingRow) -> dict[str, Array]:
    """The leaves of one number a slot: the only ones gathered in every step."""
    wide = ("bias_ids", "bias_values", "stop_ids")
    return {name: table for name, table in vars(rows).items() if name not in wide}


def _adjust(
    logits: Array, state: SamplingState, slots: Array, drafts: Array | None, positions: Array
) -> Array:
    """Logits [B, T, V] after penalties, bias and the ban of stop tokens, each only if wanted."""
    rows = state.rows
    penalized = (rows.repetition[slots] != 1) | (rows.presence[slots] != 0)
    penalized = (penalized | (rows.frequency[slots] != 0)).any()
    biased = (rows.bias_ids[slots, 0] >= 0).any()
    early = positions + 1 < rows.stop_from[slots][:, None]  # [B, T]
    early = early & (rows.stop_ids[slots, 0] >= 0)[:, None]

    def penalize(logits: Array) -> Array:
        return _penalize(logits, state, slots, drafts)

    def bias(logits: Array) -> Array:
        ids = rows.bias_ids[slots]
        values = jnp.where(ids >= 0, rows.bias_values[slots], 0)
        return logits + _spread(ids, values, logits.shape[-1])[:, None]

    def ban(logits: Array) -> Array:
        ids = rows.stop_ids[slots]
        stops = _spread(ids, (ids >= 0).astype(jnp.float32), logits.shape[-1])
        return jnp.where(early[..., None] & (stops > 0)[:, None], -jnp.inf, logits)

    def adjust(logits: Array) -> Array:
        logits = _choice(penalized, penalize, _same, logits)
        logits = _choice(biased, bias, _same, logits)
        return _choice(early.any(), ban, _same, logits)

    return _choice(penalized | biased | early.any(), adjust, _same, logits)


def _choice(wanted: Array, then: Callable, otherwise: Callable, *operands: Array) -> Any:
    """`then(*operands)` if wanted, a bool[], else `otherwise(*operands)`.

    GPUs compute both: there the host reads a condition and, until the whole step has run so far,
    waits for it instead of sending the next step.
    """

    def both(*operands: Array) -> Any:
        pairs = then(*operands), otherwise(*operands)
        return jax.tree.map(lambda one, other: jnp.where(wanted, one, other), *pairs)

    def one(*operands: Array) -> Any:
        return lax.cond(wanted, then, otherwise, *operands)

    return lax.platform_dependent(*operands, cpu=one, default=both)


def _same(logits: Array) -> Array:
    return logits


def _spread(ids: Array, values: Array, vocab: int) -> Array:
    """f32[B, V] that holds values [B, N] at ids [B, N]; negative ids are left out."""
    ids = jnp.where(ids >= 0, ids, vocab)
    batch = jnp.broadcast_to(jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None], ids.shape)
    empty = jnp.zeros((ids.shape[0], vocab), jnp.float32)
    return empty.at[batch, ids].add(values, mode="drop")


def _penalize(logits: Array, state: SamplingState, slots: Array, drafts: Array | None) -> Array:
    """Repetition penalty as in Hugging Face's processor, the other two as OpenAI defines them."""
    rows = state.rows
    counts = state.counts[slots][:, None]  # [B, 1, V]
    seen = state.seen[slots][:, None]
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None]
    row = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :, None]
    for index in range(0 if drafts is None else drafts.shape[1]):
        met = (ids == drafts[:, index, None, None]) & (row > index)  # type: ignore[index]
        counts = counts + met.astype(jnp.int32)
        seen = seen | met
    repetition = rows.repetition[slots][:, None, None]
    frequency = rows.frequency[slots][:, None, None]
    presence = rows.presence[slots][:, None, None]
    penalized = jnp.where(logits < 0, logits * repetition, logits / repetition)
    logits = jnp.where(seen, penalized, logits)
    logits = logits - frequency * counts.astype(jnp.float32)
    return logits - presence * (counts > 0).astype(jnp.float32)


def _unpack(bitmask: Array, vocab: int) -> Array:
    """bool[..., V] of u32[..., ceil(V / 32)], the lowest bit first."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    bits = (bitmask[..., None] >> shifts.reshape((1,) * bitmask.ndim + (32,))) & jnp.uint32(1)
    return (bits != 0).reshape(*bitmask.shape[:-1], -1)[..., :vocab]


def _choose(logits: Array, small: dict[str, Array], positions: Array) -> Array:
    """i32[B, T]: the argmax where temperature is 0, else a draw keyed by (seed, position)."""
    temperature = small["temperature"][:, None]
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    cuts = (small["top_p"] < 1) | (small["top_k"] > 0) | (small["min_p"] > 0)
    cuts = (cuts & (small["temperature"] > 0)).any()

    def draw(logits: Array) -> Array:
        best = logits.max(axis=-1, keepdims=True)
        best = jnp.where(jnp.isfinite(best), best, 0)
        scaled = (logits - best) / jnp.maximum(temperature, _COLDEST)[..., None]
        scaled = _choice(cuts, lambda scaled: _cut(scaled, small), _same, scaled)
        noise = _noise(small["seed"], positions, logits.shape[-1])
        drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
        return jnp.where(temperature > 0, drawn, greedy)

    return _choice((temperature > 0).any(), draw, lambda logits: greedy, logits)


def _noise(seed: Array, positions: Array, vocab: int) -> Array:
    """Gumbel noise f32[B, T, V]; threefry by name, since other generators depend on the batch."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab,), jnp.float32, mode="high")

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seed, positions)


def _cut(scaled: Array, small: dict[str, Array]) -> Array:
    """Logits after min_p, then top_k, then top_p over what is left; equals stay together.

    scaled f32[B, T, V] has its maximum at 0, so min_p is a floor of log(min_p).
    """
    top_k, top_p = small["top_k"][:, None], small["top_p"][:, None]
    bits = lax.bitcast_convert_type(scaled, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    keys = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned order = order of the floats
    kth = _threshold(keys, jnp.ones_like(scaled), jnp.maximum(top_k, 1).astype(jnp.float32))
    kth = jnp.where((top_k > 0)[..., None], kth[..., None], jnp.uint32(0))
    alive = (keys >= kth) & (scaled >= jnp.log(small["min_p"])[:, None, None])
    mass = jnp.where(alive, jnp.exp(scaled), 0)
    # Parted from the first search, of whose comparisons XLA would keep a whole table.
    nucleus = _threshold(lax.optimization_barrier(keys), mass, top_p * mass.sum(axis=-1))
    nucleus = jnp.where((top_p < 1)[..., None], nucleus[..., None], jnp.uint32(0))
    return jnp.where(alive & (keys >= nucleus), scaled, -jnp.inf)


def _threshold(keys: Array, weights: Array, target: Array) -> Array:
    """u32[B, T]: the largest key whose tokens of at least that key weigh `target` or more.

    Sixteen-way search over the bits: 8 passes of compare and sum, where a sort of the vocabulary
    would cost milliseconds. keys u32[B, T, V], weights f32[B, T, V], target f32[B, T] or [B, 1].
    """
    digits = jnp.arange(1, 16, dtype=jnp.uint32)[None, None]

    def refine(step: Array | int, found: Array) -> Array:
        shift = jnp.uint32(28) - jnp.uint32(4) * lax.convert_element_type(step, jnp.uint32)
        candidates = found[..., None] + (digits << shift)
        above = keys[:, :, None] >= candidates[..., None]  # [B, T, 15, V], fused into the sum
        weight = jnp.where(above, weights[:, :, None], 0).sum(axis=-1)
        passed = (weight >= target[..., None]).sum(axis=-1, dtype=jnp.uint32)
        return found + (passed << shift)

    def loop(found: Array) -> Array:
        return lax.fori_loop(0, 8, refine, found)

    def unrolled(found: Array) -> Array:  # a loop would not be part of a GPU's command buffer
        for step in range(8):
            found = refine(step, found)
        return found

    found = jnp.zeros(keys.shape[:-1], jnp.uint32)
    return lax.platform_dependent(found, cpu=loop, default=unrolled)


def _logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    """Log softmax of the raw logits at `tokens`, and its MAX_LOGPROBS largest."""
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - total
    kept = min(MAX_LOGPROBS, logits.shape[-1])
    values, ids = _likeliest(logits, kept)
    pad = ((0, 0), (0, 0), (0, MAX_LOGPROBS - kept))
    values = jnp.pad(values - total[..., None], pad, constant_values=-jnp.inf)
    return chosen, jnp.pad(ids.astype(jnp.int32), pad), values


def _likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """`lax.top_k` of finite logits over a vocabulary, which XLA would sort: [B, T, count] each.

    They are in the `count` blocks with the largest maxima. Of equals the lower id comes first, as
    the lower block does: `count` lower blocks of one maximum hold as many lower ids of that value.
    """
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    blocks = -(-vocab // _BLOCK)
    if blocks <= count:
        return lax.top_k(logits, count)
    pad = ((0, 0), (0, 0), (0, blocks * _BLOCK - vocab))
    parts = jnp.pad(logits, pad, constant_values=-jnp.inf).reshape(*shape, blocks, _BLOCK)
    block = jnp.sort(lax.top_k(parts.max(axis=-1), count)[1], axis=-1)
    kept = jnp.take_along_axis(parts, block[..., None], axis=-2)
    values, place = lax.top_k(kept.reshape(*shape, -1), count)
    first = jnp.take_along_axis(block, place // _BLOCK, axis=-1) * _BLOCK
    return values, first + place % _BLOCK


def _no_logprobs(logits: Array, tokens: Array) -> tuple[Array, Array, Array]:
    wide = (*tokens.shape, MAX_LOGPROBS)
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    return zeros, jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32)
