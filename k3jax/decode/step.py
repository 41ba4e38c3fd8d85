"""One compiled step: plan, embed, layers, logits, sample, update the slots.

After a prefill chunk the caches hold all its rows; the token sampled at the prompt's end is not in
them yet, but in `Slots.token`. A decode step feeds that token as its first row and the drafts
after it, and emits the tokens that were sampled at the rows up to the first refused draft: as many
as there are rows now known to be right. Those rows count in `length`, and are replayed from the
pending rows by whatever step comes next, since `accepted` says how many they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from k3jax.cache import Cache, LayerCache, Slots, cache_specs, number_of_pages, real_slots
from k3jax.config import K3Config
from k3jax.decode.batch import Batch, Step, StepOutput
from k3jax.decode.config import DecodeConfig
from k3jax.decode.planner import drafts_of, plan_step
from k3jax.model.decoder import Decoder, take_rows
from k3jax.model.inputs import Residual, StepPlan, Tap, silent
from k3jax.parallel import REPLICATED, shardings, spmd
from k3jax.request import MAX_LOGPROBS
from k3jax.sampling import Sampled, observe, prompt_logprobs, sample
from k3jax.speculative import Drafter, speculate

UNBOUNDED = 2**31 - 1  # pages of a model without MLA layers
SCORED_ROWS = 128  # prompt rows whose logits exist at a time


@dataclass(frozen=True)
class Forward:
    """A step up to the logits."""

    plan: StepPlan
    drafts: jax.Array | None  # i32[B, T-1] in decode
    residual: Residual
    layers: tuple[LayerCache, ...]
    slots: Slots  # with the batch's page updates
    flags: jax.Array  # bool[B]
    health: jax.Array  # u32[]


def build_step(
    graph: nnx.GraphDef,
    config: K3Config,
    decode_config: DecodeConfig,
    step: Step,
    *,
    mesh: Mesh,
    param_specs: Any,
    drafter: Drafter | None = None,
    draft_shapes: Any = None,
) -> jax.stages.Wrapped:
    """The jitted step (params, cache, batch, health u32[], place) -> (cache, health, StepOutput).

    `graph` runs what the step's kernels do not replace. `params` is the packed tree of plain dicts,
    and with a `drafter` the pair of it and the drafter's; `draft_shapes` is what that keeps. Cache
    and health are donated, and so is `place`, a StepOutput in whose memory the new one is left, or
    None: JAX pairs donated arguments and results of one shape in their order, if it is told the
    results' shardings; otherwise XLA pairs what is of one size.
    """

    def run(
        params: Any, cache: Cache, batch: Batch, health: jax.Array
    ) -> tuple[Cache, jax.Array, StepOutput]:
        own, draft_params = (params, None) if drafter is None else params
        decoder = nnx.merge(graph, own)
        done = forward(decoder, config, decode_config, step, (cache, batch))
        finish = finish_decode if step.kind == "decode" else finish_prefill
        slots, output = finish(decoder, done, batch)
        health = health | done.health
        kept = cache.draft
        if drafter is not None:
            said = (output.tokens, output.count)
            drafted = speculate(drafter, (draft_params, kept), done.plan, slots, said)
            slots, kept, health = drafted[0], drafted[1], health | drafted[2]
            output = replace(output, drafts=slots.drafts[done.plan.slots])
        return Cache(done.layers, slots, kept), health, replace(output, health=health)

    specs = cache_specs(config, draft_shapes)
    params_specs = param_specs if drafter is None else (param_specs, REPLICATED)
    results = (specs, REPLICATED, REPLICATED)
    on_all_ranks = spmd(
        run, mesh, in_specs=(params_specs, specs, REPLICATED, REPLICATED), out_specs=results
    )

    def placed(
        params: Any, cache: Cache, batch: Batch, health: jax.Array, place: StepOutput | None = None
    ) -> tuple[Cache, jax.Array, StepOutput]:
        del place
        return on_all_ranks(params, cache, batch, health)

    return jax.jit(
        placed,
        donate_argnums=(1, 3, 4),
        keep_unused=True,
        out_shardings=shardings(mesh, results),
    )


def forward(
    decoder: Decoder,
    config: K3Config,
    decode_config: DecodeConfig,
    step: Step,
    inputs: tuple[Cache, Batch],
    tap: Tap = silent,
) -> Forward:
    """Plan the step and run it up to the last layer."""
    cache, batch = inputs
    plan, slots, plan_health = plan_step(
        step,
        cache.slots,
        batch,
        vocabulary=config.vocab_size,
        page_size=decode_config.page_size,
        pages=number_of_pages(cache) or UNBOUNDED,
        rows=decode_config.pending,
    )
    residual = decoder.start(plan)
    tap("embed", residual.part)
    residual, layers, flags, health = decoder.run(
        residual, cache.layers, plan, kernel=step.layer, tap=tap
    )
    drafts = drafts_of(step, slots, batch)
    return Forward(plan, drafts, residual, layers, slots, flags, plan_health | health)


def finish_decode(decoder: Decoder, done: Forward, batch: Batch) -> tuple[Slots, StepOutput]:
    """Sample every row, accept drafts, move the slots on by what was emitted.

    Only an emitted row can fail its request. What the layers flag may be a refused row; one that
    counts shows in its logits, since a value that is not finite never leaves the residual stream.
    """
    plan, slots = done.plan, done.slots
    logits = decoder.logits(done.residual).reshape(*plan.tokens.shape, -1)
    sampled = sample(logits, slots.sampling, plan.slots, done.drafts, plan.positions, batch.bitmask)
    count = jnp.where(plan.rows > 0, sampled.count, 0)
    last = jnp.take_along_axis(sampled.tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    index = real_slots(plan.slots, slots.length.shape[0])
    emitted = jnp.arange(sampled.tokens.shape[1], dtype=jnp.int32)[None, :] < count[:, None]
    slots = replace(
        slots,
        length=slots.length.at[index].add(count, mode="drop"),
        accepted=slots.accepted.at[index].set(count, mode="drop"),
        token=slots.token.at[index].set(last, mode="drop"),
        sampling=observe(
            slots.sampling, plan.slots, sampled.tokens, emitted, jnp.ones_like(emitted)
        ),
    )
    return slots, output_of(sampled, count, done.health, sampled.nonfinite & (plan.rows > 0))


def finish_prefill(decoder: Decoder, done: Forward, batch: Batch) -> tuple[Slots, StepOutput]:
    """Sample each request's last row, score the prompt if asked, move the slots on by the chunk."""
    plan, slots = done.plan, done.slots
    requests, rows = plan.tokens.shape
    last = jnp.maximum(plan.rows - 1, 0)
    flat = jnp.arange(requests, dtype=jnp.int32) * rows + last
    logits = decoder.logits(take_rows(done.residual, flat))[:, None]
    positions = jnp.take_along_axis(plan.positions, last[:, None], axis=1)
    # The chunk counts as met before its last row is sampled: penalties look at the whole prompt.
    generated = plan.positions >= slots.prompt_length[plan.slots][:, None]
    met = observe(slots.sampling, plan.slots, plan.tokens, plan.valid, generated)
    sampled = sample(logits, met, plan.slots, None, positions, batch.bitmask)
    ends = batch.final & (plan.rows > 0)
    met = observe(met, plan.slots, sampled.tokens, ends[:, None], ends[:, None])
    index = real_slots(plan.slots, slots.length.shape[0])
    token = jnp.where(ends, sampled.tokens[:, 0], slots.token[plan.slots])
    scores = score_prompt(decoder, done, batch)
    slots = replace(
        slots,
        length=slots.length.at[index].add(plan.rows, mode="drop"),
        accepted=slots.accepted.at[index].set(0, mode="drop"),
        token=slots.token.at[index].set(token, mode="drop"),
        sampling=met,
    )
    flags = (sampled.nonfinite | done.flags) & (plan.rows > 0)
    output = output_of(sampled, ends.astype(jnp.int32), done.health, flags)
    return slots, replace(
        output,
        prompt_logprobs=scores[0],
        prompt_top_ids=scores[1],
        prompt_top_logprobs=scores[2],
    )


def output_of(
    sampled: Sampled, count: jax.Array, health: jax.Array, flags: jax.Array
) -> StepOutput:
    """The step's output; flags bool[B] of requests that fail."""
    return StepOutput(
        tokens=sampled.tokens,
        count=count,
        logprobs=sampled.logprobs,
        top_ids=sampled.top_ids,
        top_logprobs=sampled.top_logprobs,
        nonfinite=flags,
        health=health,
    )


def score_prompt(
    decoder: Decoder, done: Forward, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log probability of the token after each row of the chunk, and the most probable ones there.

    Zeros unless a request of the batch wants them: only then are there logits of every row, some
    rows at a time. Returns (f32[B, T], i32[B, T, 20], f32[B, T, 20]).
    """
    plan = done.plan
    shape = plan.tokens.shape
    wishes = done.slots.sampling.rows.prompt_logprobs[plan.slots]
    wanted = jnp.any((wishes >= 0) & (plan.rows > 0))
    row = jnp.arange(shape[1], dtype=jnp.int32)[None, :]
    after = jnp.roll(plan.tokens, -1, axis=1)
    after = jnp.where(row == plan.rows[:, None] - 1, batch.following[:, None], after).reshape(-1)
    block = min(SCORED_ROWS, after.size)
    blocks = -(-after.size // block)
    rows = jnp.minimum(jnp.arange(blocks * block, dtype=jnp.int32), after.size - 1)

    def score(rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = decoder.logits(take_rows(done.residual, rows))
        return jax.tree.map(lambda leaf: leaf[0], prompt_logprobs(logits[None], after[rows][None]))

    def score_all() -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = lax.map(score, rows.reshape(blocks, block))
        return jax.tree.map(
            lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[: after.size].reshape(
                *shape, *leaf.shape[2:]
            ),
            scores,
        )

    def zeros() -> tuple[jax.Array, jax.Array, jax.Array]:
        top = (*shape, MAX_LOGPROBS)
        return jnp.zeros(shape, jnp.float32), jnp.zeros(top, jnp.int32), jnp.zeros(top, jnp.float32)

    return lax.cond(wanted, score_all, zeros)
