"""A draft model: a small Kimi model that every rank runs whole, one step behind the large one.

It reads what became known since it last ran from the slots' history, as rows of a verify step: its
own pending rows are committed by how many of them were known, as the large model's are by how many
were accepted. From there it guesses on a copy of the batch's recurrent states; the copy is thrown
away, and the latents that it wrote are overwritten when the text gets there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from k3jax.cache import (
    CacheSizes,
    LayerCache,
    MlaPages,
    Slots,
    empty_layers,
    page_bytes,
    put_layers,
    real_slots,
    take_layers,
)
from k3jax.checkpoint.loading import load_params
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.layers import kernel_impl
from k3jax.decode.planner import locate
from k3jax.model.decoder import Decoder, abstract_decoder, take_rows
from k3jax.model.inputs import Residual, StepPlan
from k3jax.parallel import REPLICATED, alone, make_mesh
from k3jax.sampling import sample
from k3jax.speculative import Drafter, NgramDrafter
from pallas_kernels import Impl


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draft:
    """What the draft model keeps; pages are numbered as the large model's."""

    layers: tuple[LayerCache, ...]
    length: jax.Array  # i32[S] tokens that it has read
    accepted: jax.Array  # i32[S] pending rows among them


class ModelDrafter:
    """Drafts what a second model of the same vocabulary would say, with the request's own noise."""

    def __init__(self, params: Any, config: K3Config, dtype: str, impl: Impl) -> None:
        """`params` is its packed tree for one rank, whole on every rank (see `replicate`)."""
        self.params, self.config, self.dtype = params, config, dtype
        self._graph, _ = abstract_decoder(config, 1, impl, dtype)

    def shapes(self, sizes: CacheSizes) -> Draft:
        """See `Drafter.shapes`."""
        sizes = replace(sizes, pending=sizes.pending + 1)

        def zeros() -> Draft:
            number = jnp.zeros((sizes.slots,), jnp.int32)
            return Draft(empty_layers(self.config, sizes, self.dtype), number, number)

        return jax.eval_shape(zeros)

    def page_bytes(self, sizes: CacheSizes) -> int:
        """See `Drafter.page_bytes`."""
        return page_bytes(self.config, sizes, self.dtype)

    def draft(
        self, params: Any, kept: Draft, plan: StepPlan, slots: Slots
    ) -> tuple[Draft, jax.Array, jax.Array]:
        """See `Drafter.draft`."""
        with alone():
            decoder = nnx.merge(self._graph, params)
            if plan.kind == "prefill":
                return read_prompt(decoder, kept, plan, slots)
            known = jnp.where(plan.slots > 0, slots.length[plan.slots] + 1, 0)
            kept, residual, health = catch_up(decoder, kept, plan, slots, known)
            return guess(decoder, kept, plan, slots, (known, residual, health))

    def take(self, kept: Draft, slots: jax.Array, position: jax.Array) -> tuple[Any, jax.Array]:
        """See `Drafter.take`."""
        length, accepted = kept.length[slots], kept.accepted[slots]
        return take_layers(kept.layers, slots, position, length, accepted)

    def put(
        self,
        kept: Draft,
        slots: jax.Array,
        position: jax.Array,
        taken: Any,
        pages: tuple[jax.Array, jax.Array],
    ) -> Draft:
        """See `Drafter.put`."""
        layers = put_layers(kept.layers, slots, position, taken, pages)
        return moved(replace(kept, layers=layers), slots, position, jnp.zeros_like(position))


def read_prompt(
    decoder: Decoder, kept: Draft, plan: StepPlan, slots: Slots
) -> tuple[Draft, jax.Array, jax.Array]:
    """Run the chunk that the large model ran; guesses wait for the first decode step."""
    accepted = jnp.where(plan.fresh, 0, kept.accepted[plan.slots])
    plan = replace(plan, accepted=accepted)
    _, layers, _, health = decoder.run(decoder.start(plan), kept.layers, plan)
    kept = moved(replace(kept, layers=layers), plan.slots, plan.starts + plan.rows, 0 * plan.rows)
    return kept, jnp.full((plan.slots.size, slots.drafts.shape[1]), -1, jnp.int32), health


def catch_up(
    decoder: Decoder, kept: Draft, plan: StepPlan, slots: Slots, known: jax.Array
) -> tuple[Draft, Residual, jax.Array]:
    """Read what is known, i32[B] tokens, and not yet read: at most one more than the step's rows.

    Returns (what is kept, the residual stream of all rows, health). Rows beyond what is known read
    an older text, and are refused by the count.
    """
    width = plan.tokens.shape[1] + 1
    starts = kept.length[plan.slots]
    read = jnp.clip(known - starts, 0, width)
    positions = starts[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    last = slots.history.shape[1] - 1
    tokens = jnp.take_along_axis(slots.history[plan.slots], jnp.minimum(positions, last), axis=1)
    rows = rows_of(plan, slots, tokens, positions, kept.accepted[plan.slots], kept.layers)
    residual, layers, _, health = decoder.run(decoder.start(rows), kept.layers, rows)
    kept = moved(replace(kept, layers=layers), plan.slots, starts + read, read)
    return kept, residual, health


def guess(
    decoder: Decoder,
    kept: Draft,
    plan: StepPlan,
    slots: Slots,
    caught: tuple[jax.Array, Residual, jax.Array],
) -> tuple[Draft, jax.Array, jax.Array]:
    """N drafts, each from the ones before it, on copies of the states; keeps the latents only.

    Nothing for a request that has still more to read.
    """
    known, residual, health = caught
    size = plan.slots.size
    width = residual.part.shape[0] // size
    read = kept.accepted[plan.slots]
    batch = jnp.arange(size, dtype=jnp.int32)
    residual = take_rows(residual, batch * width + jnp.maximum(read - 1, 0))
    places = jnp.where(plan.slots > 0, batch + 1, 0)
    source = jnp.concatenate([jnp.zeros((1,), jnp.int32), plan.slots])
    layers = tuple(
        layer if isinstance(layer, MlaPages) else jax.tree.map(lambda leaf: leaf[source], layer)
        for layer in kept.layers
    )
    drafts: list[jax.Array] = []
    count = slots.drafts.shape[1]
    for index in range(count):
        positions = (known - 1 + index)[:, None]  # of the row that the guess comes from
        logits = decoder.logits(residual)[:, None]
        drafts.append(sample(logits, slots.sampling, plan.slots, None, positions).tokens)
        if index + 1 < count:
            accepted = read if index == 0 else jnp.ones_like(read)
            rows = rows_of(plan, slots, drafts[-1], positions + 1, accepted, kept.layers)
            rows = replace(rows, slots=places)
            residual, layers, _, more = decoder.run(decoder.start(rows), layers, rows)
            health |= more
    pages = [
        after if isinstance(after, MlaPages) else before
        for before, after in zip(kept.layers, layers, strict=True)
    ]
    found = jnp.where((kept.length[plan.slots] == known)[:, None], jnp.concatenate(drafts, 1), -1)
    return replace(kept, layers=tuple(pages)), found, health


def rows_of(
    plan: StepPlan,
    slots: Slots,
    tokens: jax.Array,
    positions: jax.Array,
    accepted: jax.Array,
    layers: tuple[LayerCache, ...],
) -> StepPlan:
    """The plan of decode rows i32[B, T] of the draft model; a row without a page writes nowhere."""
    live = plan.slots > 0
    valid = jnp.broadcast_to(live[:, None], tokens.shape)
    table = slots.pages[plan.slots]
    pools = [layer.latents.shape[:2] for layer in layers if isinstance(layer, MlaPages)]
    pages, page_size = pools[0] if pools else (1, 1)
    write_pages, write_offsets, _ = locate(table, positions, valid, page_size, pages)
    return StepPlan(
        kind="decode",
        slots=plan.slots,
        tokens=tokens,
        positions=positions,
        valid=valid,
        accepted=jnp.where(live, accepted, 0),
        fresh=jnp.zeros_like(live),
        starts=jnp.where(live, positions[:, 0], 0),
        rows=jnp.where(live, tokens.shape[1], 0),
        page_table=table,
        write_pages=write_pages.reshape(-1),
        write_offsets=write_offsets.reshape(-1),
    )


def moved(kept: Draft, chosen: jax.Array, length: jax.Array, accepted: jax.Array) -> Draft:
    """What is kept with slots i32[B] at that length, with so many accepted pending rows."""
    index = real_slots(chosen, kept.length.shape[0])
    return replace(
        kept,
        length=kept.length.at[index].set(length, mode="drop"),
        accepted=kept.accepted.at[index].set(accepted, mode="drop"),
    )


def make_drafter(decode_config: DecodeConfig, config: K3Config, mesh: Mesh) -> Drafter | None:
    """The drafter that is asked for, beside a model of `config`; None: no drafter.

    Loads a draft model, whole on every device of `mesh`. ValueError if its vocabulary is another.
    """
    name = decode_config.drafter
    if name == "none":
        return None
    if name == "ngram":
        return NgramDrafter()
    own = K3Config.from_file(name)
    if own.vocab_size != config.vocab_size:
        raise ValueError(
            f"draft model {name} has a vocabulary of {own.vocab_size} tokens, the model one of "
            f"{config.vocab_size}: give one that was made for it"
        )
    params = load_params(name, own, make_mesh(1, mesh.local_devices))
    impl = kernel_impl(decode_config, mesh)
    return ModelDrafter(replicate(params, mesh), own, decode_config.dtype, impl)


def replicate(params: Any, mesh: Mesh) -> Any:
    """A packed tree of one device as one that every device of `mesh` holds whole."""

    def whole(leaf: jax.Array) -> jax.Array:
        host = np.asarray(leaf)
        sharding = NamedSharding(mesh, REPLICATED)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(whole, params)
