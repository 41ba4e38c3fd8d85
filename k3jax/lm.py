"""A loaded model for notebooks and tests: logits, intermediates, generation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from k3jax.cache import Cache, CacheSizes, cache_specs, make_cache
from k3jax.chat import ChatEvent, ChatOptions, ChatParser, encode, end_ids, render
from k3jax.checkpoint import load_params
from k3jax.config import K3Config
from k3jax.decode.batch import Batch, Step, empty_batch
from k3jax.decode.config import DecodeBackend, DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.decode.failstop import check_health
from k3jax.decode.layers import kernel_impl
from k3jax.decode.step import forward
from k3jax.engine import Engine
from k3jax.model.decoder import abstract_decoder, collect_into
from k3jax.model.inputs import silent
from k3jax.parallel import REPLICATED, make_mesh, spmd
from k3jax.params import packed_specs
from k3jax.request import Delta, SamplingParams
from k3jax.speculative_model import make_drafter
from k3jax.tokenizer import Tokenizer

SHORTEST = 16  # rows; shorter inputs are padded, to compile less often
LONGEST = 512  # rows whose logits are on the device at a time
Result = tuple[jax.Array, dict[str, jax.Array], jax.Array]  # logits, intermediates, health


def load(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    tp: int = 1,
    decode_backend: DecodeBackend = "auto",
    **options: Any,
) -> LanguageModel:
    """Load a checkpoint directory of either kind.

    `dtype` is that of activations and caches ("float32" to compare exactly), `tp` the number of
    devices; `options` are further fields of `DecodeConfig`, for `generate`. ValueError names what
    is wrong with the checkpoint or an option.
    """
    config = K3Config.from_file(path)
    context = min(options.pop("max_context", 8192), config.max_positions)
    requests = options.pop("max_requests", 1)
    options.setdefault("prefill_buckets", ((1, min(64, context)), (1, min(1024, context))))
    options.setdefault("prefix_cache", 0)  # in bfloat16 a prompt's second answer may differ
    options.setdefault("builds", ((options.get("num_spec", 0) + 1, requests),))
    decode_config = DecodeConfig(
        dtype=dtype,
        tp=tp,
        decode_backend=decode_backend,
        max_context=context,
        max_requests=requests,
        **options,
    )
    mesh = make_mesh(tp)
    params = load_params(path, config, mesh)
    has_tokenizer = (Path(path) / "tiktoken.model").is_file()
    tokenizer = Tokenizer.from_directory(path) if has_tokenizer else None
    return LanguageModel(params, config, decode_config, mesh, tokenizer=tokenizer)


class LanguageModel:
    """A model on its devices. `tokenizer` is None if the checkpoint has none: ids only, then."""

    def __init__(
        self,
        params: Any,
        config: K3Config,
        decode_config: DecodeConfig,
        mesh: Mesh,
        *,
        tokenizer: Tokenizer | None = None,
    ):
        self.params, self.config, self.decode_config = params, config, decode_config
        self.mesh, self.tokenizer = mesh, tokenizer
        self._forwards: dict[tuple[int, int, bool], Callable[..., tuple[Cache, Result]]] = {}

    def logits(self, prompt: str | Sequence[int]) -> np.ndarray:
        """Logits float32 [T, vocabulary] of the token after each of T tokens, text or ids."""
        ids = self._ids(prompt)
        return np.concatenate([np.asarray(logits) for logits, _ in self._run(ids, tracing=False)])

    def trace(self, prompt: str | Sequence[int]) -> dict[str, np.ndarray]:
        """What the model computes on its way to the logits of T tokens, by name.

        embed, layers.N.*, output_res, output_in, logits, most of them [T, ...]. In each layer:
        attn_in, attn_out, ffn_in, ffn_out (inputs after their norm, outputs before they are added),
        out (the residual stream after the layer); attn_res and ffn_res (the residual mix) with
        attn_res_weights and ffn_res_weights [T, blocks + 1], the running sum's weight last; kda_*
        and mla_*: what the mixers go through (see model/internals.py and model/mixers.py);
        router_experts, router_weights, experts_sum (before norm and up-projection). blocks
        [blocks, T, hidden] holds the residual blocks. Activations have the compute dtype.
        """
        ids = self._ids(prompt)
        ((logits, taps),) = self._run(ids, tracing=True)
        found = {name: np.asarray(value) for name, value in taps.items()}
        blocks = found.pop("blocks")[:, : len(ids)]
        trace = {name: value[: len(ids)] for name, value in found.items()}
        return trace | {"blocks": blocks, "logits": np.asarray(logits)}

    @overload
    def generate(self, prompt: str, **wishes: Any) -> str: ...

    @overload
    def generate(self, prompt: Sequence[int], **wishes: Any) -> list[int]: ...

    def generate(self, prompt: str | Sequence[int], **wishes: Any) -> str | list[int]:
        """Continue a text with text, or ids with ids; greedy unless told otherwise.

        `wishes` are fields of `SamplingParams`. The token that ends the answer is left out.
        """
        ids = [token for tokens in self.stream(prompt, **wishes) for token in tokens]
        if isinstance(prompt, str) and self.tokenizer is not None:
            return self.tokenizer.decode(ids)
        return ids

    def stream(self, prompt: str | Sequence[int], **wishes: Any) -> Iterator[list[int]]:
        """The ids that `generate` would return, as they come; RuntimeError if the request fails.

        Each list is what one step brought: with drafts, often several tokens.
        """
        return (delta.token_ids for delta in self._deltas(self._ids(prompt), wishes))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatOptions | None = None,
        **wishes: Any,
    ) -> Iterator[ChatEvent]:
        """The answer to a conversation as it comes: reasoning, content and tool calls.

        `messages` and `tools` are OpenAI's objects, `wishes` as in `generate`;
        `k3jax.chat.message_of` makes the events the message that the conversation goes on with.
        ValueError if the checkpoint has no tokenizer or a message cannot be said, RuntimeError if
        the request fails.
        """
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: there is no chat without text")
        options = options or ChatOptions()
        ids = encode(self.tokenizer, render(messages, tools, options))
        ends = end_ids(self.tokenizer)
        parser = ChatParser(self.tokenizer, thinking=options.thinking)
        for delta in self._deltas(ids, wishes):
            yield from parser.push(delta.token_ids)
            if delta.stop_token is not None and delta.stop_token in ends:
                yield from parser.push([delta.stop_token])
        yield from parser.finish()

    def _deltas(self, ids: list[int], wishes: Mapping[str, Any]) -> Iterator[Delta]:
        params = SamplingParams(**{"temperature": 0.0, **wishes})
        for delta in self.engine.stream(ids, params):
            if delta.error is not None:
                raise RuntimeError(delta.error)
            yield delta

    @cached_property
    def engine(self) -> Engine:
        """The engine behind `generate`; compiles its steps when first asked for."""
        drafter = make_drafter(self.decode_config, self.config, self.mesh)
        executor = Executor(
            self.params, self.config, self.decode_config, self.mesh, drafter=drafter
        )
        ends = end_ids(self.tokenizer) if self.tokenizer is not None else None
        return Engine(executor, self.config, self.decode_config, end_ids=ends)

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            ids = [operator.index(token) for token in prompt]
        elif self.tokenizer is not None:
            ids = self.tokenizer.encode(prompt)
        else:
            raise ValueError("this checkpoint has no tokenizer: give token ids instead of text")
        if not ids:
            raise ValueError("a prompt needs at least one token")
        wrong = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in [0, {self.config.vocab_size})")
        return ids

    def _run(
        self, ids: list[int], *, tracing: bool
    ) -> Iterator[tuple[jax.Array, dict[str, jax.Array]]]:
        """Logits and intermediates of the tokens: all at once if tracing, or LONGEST at a time."""
        rows = max(SHORTEST, 1 << (len(ids) - 1).bit_length())
        step = Step("prefill", 1, rows if tracing else min(rows, LONGEST))
        page = self.decode_config.page_size
        pages = -(-rows // page)
        sizes = CacheSizes(2, 1 + pages, page, pages, self.decode_config.pending)
        cache = make_cache(self.config, sizes, self.decode_config.dtype, self.mesh)
        forward_rows = self._forward(step, pages, tracing)
        for start in range(0, len(ids), step.rows):
            chunk = ids[start : start + step.rows]
            batch = empty_batch(step, sizes, self.config.vocab_size)
            batch.slots[0], batch.rows[0] = 1, len(chunk)
            batch.tokens[0, : len(chunk)] = chunk
            for entry, index in enumerate(range(start // page, -(-(start + len(chunk)) // page))):
                batch.page_updates[entry] = (1, index, index + 1)
            cache, (logits, taps, health) = forward_rows(self.params, cache, batch)
            check_health(int(health))
            yield logits[: len(chunk)], taps

    def _forward(
        self, step: Step, pages: int, tracing: bool
    ) -> Callable[..., tuple[Cache, Result]]:
        """The jitted (params, cache, batch) -> (cache, result) for all rows of a prefill step."""
        key = (step.rows, pages, tracing)
        if key not in self._forwards:
            self._forwards[key] = build_forward(
                self.config, self.decode_config, step, self.mesh, tracing=tracing
            )
        return self._forwards[key]


def build_forward(
    config: K3Config, decode_config: DecodeConfig, step: Step, mesh: Mesh, *, tracing: bool
) -> Callable[[Any, Cache, Batch], tuple[Cache, Result]]:
    """The jitted forward of a prefill step that keeps the logits of every row; donates the cache.

    Only the caches and the requests' lengths move on; nothing is sampled.
    """
    impl = kernel_impl(decode_config, mesh)
    graph, _ = abstract_decoder(config, decode_config.tp, impl, decode_config.dtype)

    def run(params: Any, cache: Cache, batch: Batch) -> tuple[Cache, Result]:
        taps: dict[str, jax.Array] = {}
        tap = collect_into(taps) if tracing else silent
        decoder = nnx.merge(graph, params)
        done = forward(decoder, config, decode_config, step, (cache, batch), tap)
        logits = decoder.logits(done.residual, tap)
        tap("blocks", done.residual.blocks)
        length = done.slots.length.at[done.plan.slots].add(done.plan.rows)
        slots = replace(done.slots, length=length)
        return Cache(done.layers, slots), (logits, taps, done.health)

    specs = cache_specs(config)
    function = spmd(
        run,
        mesh,
        in_specs=(packed_specs(config), specs, REPLICATED),
        out_specs=(specs, REPLICATED),
    )
    return jax.jit(function, donate_argnums=1)
