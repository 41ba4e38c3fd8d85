"""The two faces of a step: `Step` names what was compiled, `Batch` is what the host sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import jax
import numpy as np

from k3jax.cache import CacheSizes
from k3jax.model.decoder import LayerKernel, no_kernel
from k3jax.request import MAX_LOGPROBS


@dataclass(frozen=True)
class Step:
    """Static key of a compiled step; the host chooses one for each step it runs."""

    kind: Literal["prefill", "decode"]
    requests: int  # B
    rows: int  # T, of each request
    specialized: bool = False
    # Of a specialized step; the other fields say enough to tell steps apart.
    kernels: Callable[[int], LayerKernel | None] = field(
        default=no_kernel, repr=False, compare=False
    )

    @property
    def sampled_rows(self) -> int:
        """Rows of each request that are sampled: all in decode, the last one in prefill."""
        return self.rows if self.kind == "decode" else 1

    def layer(self, index: int) -> LayerKernel | None:
        """The kernel that replaces layer `index` in this step, or None: it stays the decoder's."""
        return self.kernels(index)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What the host sends with a step; numpy int32. Fields of the other kind of step are None.

    A decode step reads each request's next token, length and accepted count on the device, by slot.
    An array must not change while a dispatched step may still read it.
    """

    slots: Any  # [B]; 0: a null request
    page_updates: Any  # [B * n, 3] (slot, index in its table, page); (0, 0, 0) does nothing
    drafts: Any = None  # decode [B, T-1]; -1: none. None: those of the slots, or T is 1
    tokens: Any = None  # prefill [B, T]: the chunk
    rows: Any = None  # prefill [B] valid tokens of it
    final: Any = None  # prefill bool[B]: the prompt ends here, sample
    following: Any = None  # prefill [B]: the prompt's next token, -1 if none; for its logprob
    bitmask: Any = None  # u32[B, rows sampled, ceil(V / 32)]; a set bit allows. None: all tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step gives the host, whole on every rank; of T sampled rows the first `count` count.

    T is 1 in prefill. Log probabilities are zero unless a request of the batch wants them. The host
    has a copy, which no later step touches (see buffers.py).
    """

    tokens: jax.Array  # i32[B, T]
    count: jax.Array  # i32[B] tokens emitted, 0 to T; 0 for null requests and unfinished prompts
    logprobs: jax.Array  # f32[B, T]
    top_ids: jax.Array  # i32[B, T, 20]
    top_logprobs: jax.Array  # f32[B, T, 20]
    nonfinite: jax.Array  # bool[B] the request met a NaN or infinity and must fail
    health: jax.Array  # u32[] the word after this step; ranks may hold different ones
    prompt_logprobs: jax.Array | None = None  # prefill f32[B, T]: of the token AFTER each row
    prompt_top_ids: jax.Array | None = None  # prefill i32[B, T, 20]
    prompt_top_logprobs: jax.Array | None = None  # prefill f32[B, T, 20]
    votes: jax.Array | None = None  # u32[ranks, 3] of the fail-stop, every so many steps
    drafts: jax.Array | None = None  # i32[B, num_spec] for the next step, if there is a drafter


def output_shapes(step: Step, num_spec: int) -> StepOutput:
    """What `step` gives the host, as shapes without shardings; `num_spec`: of a drafter, or 0."""
    requests, sampled = step.requests, step.sampled_rows

    def shape(dtype: Any, *dims: int) -> Any:
        return jax.ShapeDtypeStruct((requests, *dims), dtype)

    output = StepOutput(
        tokens=shape(np.int32, sampled),
        count=shape(np.int32),
        logprobs=shape(np.float32, sampled),
        top_ids=shape(np.int32, sampled, MAX_LOGPROBS),
        top_logprobs=shape(np.float32, sampled, MAX_LOGPROBS),
        nonfinite=shape(np.bool_),
        health=cast(Any, jax.ShapeDtypeStruct((), np.uint32)),
        drafts=shape(np.int32, num_spec) if num_spec else None,
    )
    if step.kind == "decode":
        return output
    return replace(
        output,
        prompt_logprobs=shape(np.float32, step.rows),
        prompt_top_ids=shape(np.int32, step.rows, MAX_LOGPROBS),
        prompt_top_logprobs=shape(np.float32, step.rows, MAX_LOGPROBS),
    )


def empty_batch(step: Step, sizes: CacheSizes, vocabulary: int, *, masked: bool = False) -> Batch:
    """A batch of null requests in the shapes that `step` was compiled for, to be filled in.

    With `masked` it has a bitmask, which allows everything.
    """
    requests, rows = step.requests, step.rows
    # The pages that a request's rows can enter, or at first a draft model's, which go further.
    updates = -(-(rows + sizes.pending + 1) // sizes.page_size) + 1
    number = np.zeros(requests, np.int32)
    mask = None
    if masked:
        words = -(-vocabulary // 32)
        mask = np.full((requests, step.sampled_rows, words), 0xFFFFFFFF, np.uint32)
    batch = {
        "slots": number,
        "page_updates": np.zeros((requests * updates, 3), np.int32),
        "bitmask": mask,
    }
    if step.kind == "decode":
        hosted = rows > 1 and not sizes.history  # else a drafter puts them into the slots
        drafts = np.full((requests, rows - 1), -1, np.int32) if hosted else None
        return Batch(**batch, drafts=drafts)
    return Batch(
        **batch,
        tokens=np.zeros((requests, rows), np.int32),
        rows=number.copy(),
        final=np.zeros(requests, bool),
        following=np.full(requests, -1, np.int32),
    )
