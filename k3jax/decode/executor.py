"""Owns the device's side of serving: parameters, cache, health, and every compiled step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Compiled, Lowered

from k3jax.cache import (
    Cache,
    CacheSizes,
    SlotInit,
    abstract_cache,
    admit,
    fixed_bytes,
    make_cache,
    page_bytes,
)
from k3jax.config import K3Config
from k3jax.decode.agreement import agree_on_minimum, refusal
from k3jax.decode.batch import Batch, Step, StepOutput, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.step import build_step
from k3jax.model.decoder import abstract_decoder
from k3jax.parallel import REPLICATED
from k3jax.params import packed_shapes, packed_specs
from k3jax.request import SamplingParams
from k3jax.sampling import sampling_row

LOGGER = logging.getLogger(__name__)
RESERVE = 0.04  # of a device's memory, left to collectives, executables and fragmentation


def steps_of(decode_config: DecodeConfig) -> tuple[Step, ...]:
    """Every step that is compiled before serving: prefill buckets, then builds, widest first."""
    prefill = [Step("prefill", b, t) for b, t in decode_config.prefill_buckets]
    decode = [Step("decode", b, q) for q, b in decode_config.builds]
    return tuple(
        step
        for kind in (prefill, decode)
        for step in sorted(kind, key=lambda step: (-step.requests * step.rows, step.rows))
    )


class Executor:
    """Runs steps; nothing is compiled after the constructor returns.

    `params` is the packed tree on `mesh`; it belongs to the executor from now on. `progress` is
    told in words what is being done. Raises ValueError if the parameters do not fit the config or
    the memory does not hold one request of `max_context` tokens, or if it must be specialized
    decode: every step runs the stock path so far, which is what `auto` comes to.
    """

    def __init__(
        self,
        params: Any,
        config: K3Config,
        decode_config: DecodeConfig,
        mesh: Mesh,
        *,
        progress: Callable[[str], None] = LOGGER.info,
    ):
        if mesh.size != decode_config.tp:
            raise ValueError(f"tp is {decode_config.tp}, but the mesh has {mesh.size} devices")
        if decode_config.decode_backend == "specialized":
            raise refusal("any model", ["layer kernels are not wired into steps yet"])
        check_params(params, config, decode_config.tp)
        self.params, self.config, self.decode_config = params, config, decode_config
        self.mesh, self.progress = mesh, progress
        self.compilations = 0
        self.graph, _ = abstract_decoder(
            config, decode_config.tp, decode_config.impl, decode_config.dtype
        )
        self.steps = steps_of(decode_config)
        self.sizes = self._choose_sizes()
        self._compiled = self._compile_all()
        self.cache: Cache = make_cache(config, self.sizes, decode_config.dtype, mesh)
        self._admit = self._compile_admit()
        self.health = jax.device_put(np.uint32(0), NamedSharding(mesh, REPLICATED))

    def admit(self, slot: int, init: SlotInit) -> None:
        """Give a slot in [1, slots) to a new request; it must not be in a step that runs later."""
        if not 1 <= slot < self.sizes.slots:
            raise ValueError(f"slot {slot} lies outside [1, {self.sizes.slots - 1}]")
        slots = self._admit(self.cache.slots, np.int32(slot), init)
        self.cache = replace(self.cache, slots=slots)

    def run(self, step: Step, batch: Batch) -> StepOutput:
        """Dispatch one step and return its results as arrays that may still be on their way.

        The batch's arrays must not change until they have arrived. Raises ValueError if the step is
        none of `steps`.
        """
        compiled = self._compiled.get(step)
        if compiled is None:
            raise ValueError(f"{step} was not compiled; there are {list(self.steps)}")
        self.cache, output, self.health = compiled(self.params, self.cache, batch, self.health)
        return output

    def empty_batch(self, step: Step) -> Batch:
        """A batch of null requests for `step`, new numpy arrays to be filled in."""
        return empty_batch(step, self.sizes, self.config.vocab_size)

    def _compile_all(self) -> dict[Step, Compiled]:
        """Every step compiled; tracing holds Python's lock, so only the compilers run abreast."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            started = {
                pool.submit(compile_timed, self._lower(step, self.sizes)): step
                for step in self.steps
            }
            compiled = {}
            for future in as_completed(started):
                step = started[future]
                compiled[step], seconds = future.result()
                self.compilations += 1
                name = f"{step.kind} of {step.requests} x {step.rows}"
                done = f"{len(compiled)} of {len(started)}"
                self.progress(f"compiled {name} ({done}) in {seconds:.1f} s")
            return compiled

    def _lower(self, step: Step, sizes: CacheSizes) -> Lowered:
        config, decode_config = self.config, self.decode_config
        specs = packed_specs(config)
        function = build_step(
            self.graph, config, decode_config, step, mesh=self.mesh, param_specs=specs
        )
        cache = abstract_cache(config, sizes, decode_config.dtype, self.mesh)
        batch = empty_batch(step, sizes, config.vocab_size)
        health = self._replicated(np.uint32(0))
        return function.lower(self.params, cache, batch, health)

    def _compile_admit(self) -> Any:
        whole = jax.tree.map(lambda leaf: leaf.sharding, self.cache.slots)
        function = jax.jit(admit, donate_argnums=0, out_shardings=whole)
        init = SlotInit(np.int32(0), sampling_row(SamplingParams(), (), 0, 0))
        self.compilations += 1
        return function.lower(self.cache.slots, np.int32(0), init).compile()

    def _replicated(self, value: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, REPLICATED)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def _choose_sizes(self) -> CacheSizes:
        """Slots as configured; as many pages as the memory holds and the requests can use."""
        decode_config = self.decode_config
        needed = 1 + decode_config.max_requests * decode_config.max_pages
        sizes = CacheSizes(
            slots=decode_config.slots,
            pages=needed,
            page_size=decode_config.page_size,
            max_pages=decode_config.max_pages,
            pending=decode_config.pending,
        )
        memory = decode_config.cache_memory
        if memory is None:
            memory = self._free_memory(replace(sizes, pages=1 + decode_config.max_pages))
        if memory is None:
            return sizes
        fixed = fixed_bytes(self.config, sizes, decode_config.dtype, decode_config.tp)
        each = page_bytes(self.config, sizes, decode_config.dtype)
        pages = agree_on_minimum(
            max(0, memory - fixed) // each if each else needed, "the number of pages"
        )
        if pages < 1 + decode_config.max_pages:
            raise ValueError(
                f"cache memory of {memory} bytes holds {fixed} bytes of KDA slots and then "
                f"{pages} pages of {each} bytes; a request of {decode_config.max_context} tokens "
                f"needs {1 + decode_config.max_pages}: lower max_requests or max_context"
            )
        return replace(sizes, pages=min(pages, needed))

    def _free_memory(self, profiling: CacheSizes) -> int | None:
        """Bytes of a device that the cache may take, found by compiling the largest steps.

        None where the backend does not say how much memory it has (a CPU).
        """
        stats = device_memory(self.mesh)
        if stats is None:
            return None
        largest = (next(s for s in self.steps if s.kind == kind) for kind in ("prefill", "decode"))
        scratch = 0
        for step in largest:
            analysis = self._lower(step, profiling).compile().memory_analysis()
            if analysis is None:
                raise NotImplementedError(
                    f"this backend does not say what memory {step} needs: set cache_memory"
                )
            scratch = max(
                scratch, analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes
            )
        limit, in_use = stats
        return max(0, int(limit * (1 - RESERVE)) - in_use - scratch)


def device_memory(mesh: Mesh) -> tuple[int, int] | None:
    """(limit, in use) in bytes of this process' first device; None if it does not say."""
    stats = mesh.local_devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"], stats["bytes_in_use"]


def compile_timed(lowered: Lowered) -> tuple[Compiled, float]:
    """The executable, and the seconds it took."""
    begin = time.perf_counter()
    return lowered.compile(), time.perf_counter() - begin


def check_params(params: Any, config: K3Config, tp: int) -> None:
    """Raise one ValueError that lists every array that the model does not have so."""

    def described(tree: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}

    wanted, found = described(packed_shapes(config, tp)), described(params)
    wrong = [
        f"{name} is {found.get(name, 'missing')}, not {wanted.get(name, 'wanted')}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    if wrong:
        raise ValueError(f"parameters do not fit the model at TP {tp}: {'; '.join(wrong)}")
