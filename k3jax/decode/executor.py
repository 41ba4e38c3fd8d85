"""Owns the device's side of serving: parameters, cache, health, and every compiled step."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
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
from k3jax.decode.batch import Batch, Step, StepOutput, empty_batch, output_shapes
from k3jax.decode.buffers import StepBuffers, fences
from k3jax.decode.config import DecodeConfig
from k3jax.decode.failstop import FailStop
from k3jax.decode.layers import kernel_impl
from k3jax.decode.reasons import BatchRows, Reason
from k3jax.decode.sizing import CacheBytes, fit
from k3jax.decode.specialized import SpecializedDecode
from k3jax.decode.step import build_step
from k3jax.model.decoder import abstract_decoder
from k3jax.parallel import REPLICATED
from k3jax.params import packed_shapes, packed_specs
from k3jax.request import SamplingParams
from k3jax.sampling import sampling_row
from k3jax.snapshots import Resume, SnapshotPool, snapshot_bytes
from k3jax.speculative import Drafter

LOGGER = logging.getLogger(__name__)
RESERVE = 0.04  # of a device's memory, left to collectives, executables and fragmentation


def stock_builds(decode_config: DecodeConfig) -> tuple[Step, ...]:
    """The decode steps of the stock path."""
    return tuple(Step("decode", requests, rows) for rows, requests in decode_config.builds)


def widest_first(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps in the order in which they are compiled."""
    return tuple(sorted(steps, key=lambda step: (-step.requests * step.rows, step.rows)))


class Executor:
    """Runs steps; nothing is compiled after the constructor returns.

    `params` is the packed tree on `mesh`; it belongs to the executor from now on. `progress` is
    told in words what is being done. Raises ValueError if the parameters do not fit the config, if
    the memory does not hold one request of `max_context` tokens, or if decode must be specialized
    and cannot be.
    """

    def __init__(
        self,
        params: Any,
        config: K3Config,
        decode_config: DecodeConfig,
        mesh: Mesh,
        *,
        drafter: Drafter | None = None,
        progress: Callable[[str], None] = LOGGER.info,
    ):
        if (drafter is None) != (decode_config.drafter == "none"):
            given = "none was given" if drafter is None else f"a {type(drafter).__name__} was given"
            raise ValueError(
                f"the config has drafter {decode_config.drafter}, but {given}: make both with "
                "speculative_model.make_drafter"
            )
        if mesh.size != decode_config.tp:
            raise ValueError(f"tp is {decode_config.tp}, but the mesh has {mesh.size} devices")
        check_params(params, config, decode_config.tp)
        self.params, self.config, self.decode_config = params, config, decode_config
        self.mesh, self.progress, self.drafter = mesh, progress, drafter
        self.compilations = 0
        self._compiled: dict[Step, tuple[Compiled, StepBuffers]] = {}
        self._generation = 0
        self.specialized = SpecializedDecode(params, config, decode_config, mesh, say=progress)
        prefill = (Step("prefill", b, t) for b, t in decode_config.prefill_buckets)
        decode = self.specialized.steps or stock_builds(decode_config)
        self.steps = (*widest_first(prefill), *widest_first(decode))
        self.sizes = self._choose_sizes()
        self._compile(self.steps)
        for line in self.specialized.describe():
            progress(line)
        self.failstop = FailStop(mesh, decode_config.check_every, decode_config.fault)
        self.health = jax.device_put(np.uint32(0), NamedSharding(mesh, REPLICATED))
        self._bitmasks = self._all_tokens()
        self.prepare_kv(self.make_cache(self.sizes))
        self._admit = self._compile_admit()
        self._pool = self._make_pool()
        sides = (buffers.sides for _, buffers in self._compiled.values())
        self._fences = fences(sides, mesh.local_devices)

    @property
    def cache(self) -> Cache:
        """What the next step takes. Kernels are not bound to one that was assigned here."""
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        self._cache = cache
        self._generation += 1

    def prepare_kv(self, cache: Cache) -> bool:
        """Go on with another cache of the same sizes, and bind the layer kernels to it.

        Returns whether they are bound. Where they are refused, decode steps run on the stock path,
        which is compiled now if it was not; under the backend `specialized` ValueError says why.
        """
        self.cache = cache
        bound = self.specialized.prepare_kv(cache, self.sizes, self._generation)
        if not bound and not self.specialized.required:
            self._compile(stock_builds(self.decode_config))
        return bound

    def plan(self, batch: BatchRows) -> Step | None:
        """The specialized step for these rows, or None: the stock path runs them, see `reason`.

        RuntimeError if it may not (backend `specialized`).
        """
        return self.specialized.plan(batch, self._generation)

    def reason(self, batch: BatchRows) -> Reason | None:
        """Why these rows run on the stock path."""
        return self.specialized.reason(batch, self._generation)

    def admit(self, slot: int, init: SlotInit) -> None:
        """Give a slot in [1, slots) to a new request; it must not be in a step that runs later."""
        if not 1 <= slot < self.sizes.slots:
            raise ValueError(f"slot {slot} lies outside [1, {self.sizes.slots - 1}]")
        slots = self._admit(self._cache.slots, np.int32(slot), init)
        self._cache = replace(self._cache, slots=slots)

    def save(self, slot: int, position: int, number: int) -> None:
        """Take a snapshot of a slot at a position among its pending rows, into the pool."""
        order = np.array([slot, position, number], np.int32)
        self.health = self._snapshots.save(self._cache, self.health, order)

    def resume(self, order: Resume) -> None:
        """Let a slot that was just admitted go on from a snapshot."""
        self._cache = self._snapshots.resume(self._cache, order)

    @property
    def _snapshots(self) -> SnapshotPool:
        if self._pool is None:
            raise ValueError("there is no pool of snapshots: prefix_cache is 0, or too small")
        return self._pool

    def run(self, step: Step, batch: Batch) -> StepOutput:
        """Dispatch one step and return its results as arrays that may still be on their way.

        The batch's arrays must not change until they have arrived. Raises ValueError if the step
        was not compiled, RuntimeError if it is specialized and parameters or cache were exchanged.
        """
        if step not in self._compiled:
            raise ValueError(f"{step} was not compiled; there are {list(self._compiled)}")
        compiled, buffers = self._compiled[step]
        if step.specialized:
            self.specialized.check(self.params, self._generation)
        health = self.failstop.inject(self.health)
        cache = self.failstop.poison(self._cache, int(batch.slots[0]))
        if batch.bitmask is None:
            batch = replace(batch, bitmask=self._bitmasks[step.requests, step.sampled_rows])
        self._cache, self.health, output = compiled(
            self._weights, cache, buffers.put(batch), health, buffers.place()
        )
        output = buffers.take(output)
        return replace(output, votes=self.failstop.after_step(output.health))

    def empty_batch(self, step: Step) -> Batch:
        """A batch of null requests for `step`, new numpy arrays to be filled in."""
        return empty_batch(step, self.sizes, self.config.vocab_size)

    def _all_tokens(self) -> dict[tuple[int, int], jax.Array]:
        """The bitmasks of steps without a grammar, which stay on the devices."""
        whole = NamedSharding(self.mesh, REPLICATED)
        masks: dict[tuple[int, int], jax.Array] = {}
        for step in self.steps:
            key = (step.requests, step.sampled_rows)
            if key not in masks:  # several prefill steps have the same one
                batch = empty_batch(step, self.sizes, self.config.vocab_size, masked=True)
                masks[key] = jax.device_put(batch.bitmask, whole)
        return masks

    def make_cache(self, sizes: CacheSizes) -> Cache:
        """An empty cache for these steps."""
        draft = self._draft_shapes(sizes)
        return make_cache(self.config, sizes, self.decode_config.dtype, self.mesh, draft)

    @property
    def _weights(self) -> Any:
        """The first argument of a step."""
        return self.params if self.drafter is None else (self.params, self.drafter.params)

    def _draft_shapes(self, sizes: CacheSizes) -> Any:
        return None if self.drafter is None else self.drafter.shapes(sizes)

    def _compile(self, steps: Sequence[Step]) -> None:
        """Compile what is missing; only the compilers run abreast, tracing holds Python's lock."""
        missing = [step for step in steps if step not in self._compiled]
        begin = time.perf_counter()
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            started = {
                pool.submit(self._build, step, self._lower(step, self.sizes)): step
                for step in missing
            }
            for number, future in enumerate(as_completed(started), 1):
                step = started[future]
                self._compiled[step], seconds = future.result()
                self.compilations += 1
                path = "specialized " if step.specialized else ""
                name = f"{path}{step.kind} of {step.requests} x {step.rows}"
                self.progress(f"compiled {name} ({number} of {len(missing)}) in {seconds:.1f} s")
        if missing:
            seconds = time.perf_counter() - begin
            self.progress(f"{len(self._compiled)} executables after {seconds:.1f} s")

    def _build(self, step: Step, lowered: Lowered) -> tuple[tuple[Compiled, StepBuffers], float]:
        """The executable with its buffers, and the seconds they took.

        No collective may run here: other ranks build in an order of their own.
        """
        begin = time.perf_counter()
        built = (lowered.compile(), StepBuffers(*self._host_side(step, self.sizes)))
        return built, time.perf_counter() - begin

    def _lower(self, step: Step, sizes: CacheSizes) -> Lowered:
        config, decode_config = self.config, self.decode_config
        # What no layer kernel replaces runs ops too: the host conducts the loops of references.
        stock = step.kind == "decode" and not step.specialized
        impl = "reference" if stock else kernel_impl(decode_config, self.mesh)
        graph, _ = abstract_decoder(config, decode_config.tp, impl, decode_config.dtype)
        draft = self._draft_shapes(sizes)
        function = build_step(
            graph,
            config,
            decode_config,
            step,
            mesh=self.mesh,
            param_specs=packed_specs(config),
            drafter=self.drafter,
            draft_shapes=draft,
        )
        cache = abstract_cache(config, sizes, decode_config.dtype, self.mesh, draft)
        batch, output = self._host_side(step, sizes)
        return function.lower(self._weights, cache, batch, self._replicated(np.uint32(0)), output)

    def _host_side(self, step: Step, sizes: CacheSizes) -> tuple[Batch, StepOutput]:
        """What a step takes from the host and gives to it, as abstract arrays."""
        batch = empty_batch(step, sizes, self.config.vocab_size, masked=True)
        drafted = self.decode_config.num_spec if self.drafter is not None else 0
        return jax.tree.map(self._replicated, (batch, output_shapes(step, drafted)))

    def _compile_admit(self) -> Any:
        whole = jax.tree.map(lambda leaf: leaf.sharding, self._cache.slots)
        function = jax.jit(admit, donate_argnums=0, out_shardings=whole)
        init = SlotInit(np.int32(0), sampling_row(SamplingParams(), (), 0, 0))
        self.compilations += 1
        return function.lower(self._cache.slots, np.int32(0), init).compile()

    def _make_pool(self) -> SnapshotPool | None:
        if not self.sizes.prefix.snapshots:
            return None
        self.compilations += 2
        like = (self._cache, self.health)
        return SnapshotPool(self.config, self.sizes, self.mesh, like, self.drafter)

    def _replicated(self, value: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, REPLICATED)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    def _choose_sizes(self) -> CacheSizes:
        """Slots as configured; as many pages and snapshots as the memory holds."""
        decode_config = self.decode_config
        needed = 1 + decode_config.max_requests * decode_config.max_pages
        sizes = CacheSizes(
            slots=decode_config.slots,
            pages=needed,
            page_size=decode_config.page_size,
            max_pages=decode_config.max_pages,
            pending=decode_config.pending,
            history=decode_config.history,
        )
        memory = decode_config.cache_memory
        free = self._profile(replace(sizes, pages=2), measure=memory is None)
        one = replace(sizes, pages=1)
        small = abstract_cache(
            self.config, one, decode_config.dtype, self.mesh, self._draft_shapes(one)
        )
        each = page_bytes(self.config, sizes, decode_config.dtype)
        each += 0 if self.drafter is None else self.drafter.page_bytes(sizes)
        fixed = fixed_bytes(self.config, sizes, decode_config.dtype, decode_config.tp)
        fixed += sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(self._draft_shapes(replace(sizes, pages=0)))
        )
        snapshot = snapshot_bytes(small, self.drafter, decode_config.tp)
        needs = CacheBytes(fixed, each, snapshot)
        return fit(decode_config, sizes, needs, free if memory is None else memory)

    def _profile(self, sizes: CacheSizes, *, measure: bool) -> int | None:
        """Compile the largest steps, show the kernels a small cache, before the real one is made.

        Returns the bytes of a device that the cache may take; None where the backend does not say
        how much memory it has (a CPU), or if nobody wants to `measure`.
        """
        stats = device_memory(self.mesh) if measure else None
        scratch = 0
        if stats is not None:
            kinds = ("prefill", "decode")
            largest = [next(s for s in self.steps if s.kind == kind) for kind in kinds]
            scratch = max(self._scratch(step, sizes) for step in largest)
        if self.specialized.steps:
            profiling = self.make_cache(sizes)
            self.specialized.prepare_kv(profiling, sizes, self._generation)
            del profiling
        if stats is None:
            return None
        limit, in_use = stats
        return max(0, int(limit * (1 - RESERVE)) - in_use - scratch)

    def _scratch(self, step: Step, sizes: CacheSizes) -> int:
        """Bytes that a step needs beside its arguments and results."""
        analysis = self._lower(step, sizes).compile().memory_analysis()
        if analysis is None:
            raise NotImplementedError(
                f"this backend does not say what memory {step} needs: set cache_memory"
            )
        return analysis.temp_size_in_bytes + analysis.generated_code_size_in_bytes


def device_memory(mesh: Mesh) -> tuple[int, int] | None:
    """(limit, in use) in bytes of this process' first device; None if it does not say."""
    stats = mesh.local_devices[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"], stats["bytes_in_use"]


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
