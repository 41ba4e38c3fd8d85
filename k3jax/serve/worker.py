"""The engine child of the server: `python -m k3jax.serve.worker SETTINGS`, started by the front.

It loads the model, compiles every step, then lives between two calls: take messages, step the
engine. It ends with Fatal and a non-zero status on any error, and by itself if the front dies.
Of several processes the first has such a front; the others' loop is `ranks.follow`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import jax
import msgspec

from k3jax.chat import end_ids
from k3jax.checkpoint.loading import LoadProgress, load_params
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.decode.failstop import FailStopError
from k3jax.decode.watchdog import Watchdog
from k3jax.doctor import Wish, gather, warnings_of
from k3jax.engine import Engine
from k3jax.guided import Guides, Matcher
from k3jax.parallel import make_mesh
from k3jax.request import Delta, Request
from k3jax.serve.compiling import POLL_SECONDS, Compiling
from k3jax.serve.link import (
    Abort,
    Add,
    Deltas,
    EngineEnd,
    Fatal,
    Progress,
    Ready,
    ReadyInfo,
    Trace,
    Traced,
    WorkerSettings,
)
from k3jax.serve.ranks import GRACE_SECONDS, Leader, agree_on_checkpoint, follow, join
from k3jax.sizes import amount
from k3jax.speculative_model import make_drafter
from k3jax.tokenizer import Tokenizer

PACKAGE = Path(__file__).resolve().parent.parent
IDLE_SECONDS = 1.0  # between two looks at the parent when there is nothing to do
STATS_SECONDS = 0.25  # between two reports of the counters while steps run


def main(arguments: list[str]) -> int:
    """Serve until the front says so; the status is 0 after a shutdown, 2 for wrong arguments."""
    if len(arguments) != 1:
        print("usage: python -m k3jax.serve.worker SETTINGS  (started by k3jax.serve)")
        return 2
    settings = msgspec.json.decode(arguments[0], type=WorkerSettings)
    if settings.process_id:
        return run_rank(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front gets it too, and shuts us down
    end_with_parent(settings.parent)
    end = EngineEnd(settings)
    try:
        executor, engine = build(settings, lambda text: end.send(Progress(text)))
        end.send(Ready(describe(settings, engine, executor.compilations)))
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection need walk it
        Server(engine, end).run()
        if isinstance(engine.executor, Leader):
            engine.executor.stop()
    except BaseException as error:
        refused = is_refusal(error)
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        kernels = isinstance(error, (FailStopError, jax.errors.JaxRuntimeError))
        end.send(Fatal(text, kernels))
        if settings.coordinator is not None:
            end.close()
            time.sleep(GRACE_SECONDS)  # the others hear of it through jax.distributed in here
            end_rank(error)
        if refused:
            return 1
        raise
    finally:
        end.close()
    return 0


def run_rank(settings: WorkerSettings) -> int:
    """Be a rank that has no front; its log goes to stderr."""

    def say(text: str) -> None:
        print(f"k3jax rank {settings.process_id}: {text}", file=sys.stderr, flush=True)

    try:
        executor = load_executor(settings, say)
        say("ready")
        follow(executor, Watchdog(executor.decode_config.step_timeout).landing)
    except BaseException as error:  # noqa: BLE001 - every end is told, and none waits for others
        end_rank(error)
    return 0


def end_rank(error: BaseException) -> NoReturn:
    """Say why and end at once: in an orderly end jax.distributed would wait for the other ranks."""
    text = f"fatal: {error}" if is_refusal(error) else "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    os._exit(1)


def is_refusal(error: BaseException) -> bool:
    """Whether an error is what this package itself has to say of a model, a setting or a rank.

    It says all there is to say; a traceback helps with the others.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    said = isinstance(error, ValueError) and own
    return said or isinstance(error, (OSError, FailStopError))


def end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, also while it loads or compiles."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def build(settings: WorkerSettings, report: Callable[[str], None]) -> tuple[Executor, Engine]:
    """The executor and the engine on top of it; see `load_executor`."""
    executor = load_executor(settings, report)
    coordinator = settings.coordinator
    engine = Engine(
        executor if coordinator is None else Leader(executor, coordinator),
        executor.config,
        executor.decode_config,
        end_ids=settings.end_ids or None,
        guides=read_guides(settings),
        landing=Watchdog(executor.decode_config.step_timeout).landing,
    )
    return executor, engine


def read_guides(settings: WorkerSettings) -> Guides | None:
    """What follows grammars; None if the checkpoint has no tokenizer."""
    if not (Path(settings.model) / "tiktoken.model").is_file():
        return None
    tokenizer = Tokenizer.from_directory(settings.model)
    return Guides(tokenizer, settings.end_ids or end_ids(tokenizer))


def load_executor(settings: WorkerSettings, report: Callable[[str], None]) -> Executor:
    """Load the model and compile its steps; ValueError names what is wrong with either."""
    decode_config = decode_config_of(settings)
    if decode_config.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", decode_config.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # all of them
    if settings.coordinator is not None:
        join(settings)
        agree_on_checkpoint(settings.model)
    config = K3Config.from_file(settings.model)
    for warning in warnings_of(gather(), Wish(config, decode_config.tp)):
        report(f"warning: {warning}")
    mesh = make_mesh(decode_config.tp)
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and decode_config.impl == "pallas":
        raise ValueError("impl pallas needs a GPU: on a CPU kernels only run as interpret, slowly")
    if on_cpu and settings.dtype is None:
        # XLA raises bfloat16 pools to float32 and lowers them again, whole, in every step.
        decode_config = replace(decode_config, dtype="float32")

    def loaded(state: LoadProgress) -> None:
        report(
            f"loaded {state.group} ({state.groups_done} of {state.groups}), "
            f"{amount(state.bytes_done, 'GB', 'MB')} at "
            f"{amount(state.bytes_per_second, 'GB', 'MB')}/s"
        )

    params = load_params(settings.model, config, mesh, progress=loaded)
    drafter = make_drafter(decode_config, config, mesh)
    return Executor(params, config, decode_config, mesh, drafter=drafter, progress=report)


def decode_config_of(settings: WorkerSettings) -> DecodeConfig:
    """DecodeConfig of the settings that were given; the rest keep its defaults."""
    names = {field.name for field in msgspec.structs.fields(settings)}
    names &= set(DecodeConfig.__dataclass_fields__)
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    if "builds" in given:
        given["builds"] = tuple(tuple(build) for build in given["builds"])
    return DecodeConfig(**given)


def describe(settings: WorkerSettings, engine: Engine, compilations: int) -> ReadyInfo:
    """What the engine can serve."""
    return ReadyInfo(
        model=Path(settings.model).name,
        vocab_size=engine.config.vocab_size,
        max_context=engine.max_context,
        slots=engine.scheduler.slots,
        pages=engine.allocator.capacity,
        compilations=compilations,
        guided=engine.guides is not None,
    )


class Server:
    """The loop between the socket and the engine."""

    def __init__(self, engine: Engine, end: EngineEnd) -> None:
        self.engine = engine
        self.end = end
        self.draining = False
        self._compiling = Compiling(engine.matcher)
        self._to_trace = 0  # steps until the profile that is being taken is whole
        self._reported = 0.0
        self._unreported = False

    def run(self) -> None:
        """Step while there is work, wait for messages while there is none."""
        try:
            while self._turn():
                pass
        finally:
            self._compiling.close()

    def _turn(self) -> bool:
        """Take what came, step once; whether there is a next turn."""
        refused: list[Delta] = []
        for message in self.end.receive(self._patience()):
            if isinstance(message, Add):
                refused += self._add(message.request)
            elif isinstance(message, Abort):
                self._compiling.drop(message.request_id)
                self.engine.abort(message.request_id)
            elif isinstance(message, Trace):
                self._trace(message)
            elif message.drain:
                self.draining = True
            else:
                return False
        for request, compiled in self._compiling.ready():
            refused += self._queue(request, compiled.result)
        self._send(refused + (self._step() if self.engine.has_work() else []))
        return not self.draining or self.engine.has_work() or len(self._compiling) > 0

    def _patience(self) -> float:
        """Seconds to wait for messages."""
        if self.engine.has_work():
            return 0.0
        return POLL_SECONDS if len(self._compiling) else IDLE_SECONDS

    def _step(self) -> list[Delta]:
        """A step of the engine, and the end of a profile with its last one."""
        deltas = self.engine.step()
        if self._to_trace:
            self._to_trace -= 1
            if not self._to_trace:
                jax.profiler.stop_trace()
                self.end.send(Traced())
        return deltas

    def _trace(self, message: Trace) -> None:
        """Begin a profile of the next steps, or say why not."""
        if self._to_trace:
            self.end.send(Traced(f"a profile is being taken: {self._to_trace} steps are missing"))
            return
        try:
            jax.profiler.start_trace(message.directory)
        except (RuntimeError, OSError) as error:
            self.end.send(Traced(str(error)))
            return
        self._to_trace = message.steps

    def _add(self, request: Request) -> list[Delta]:
        """Queue a request, one with a grammar once that is compiled, or return its refusal."""
        if self.draining:
            return [refusal_of(request, "the server is shutting down")]
        if request.params.grammar is not None:
            self._compiling.start(request)
            return []
        return self._queue(request, lambda: None)

    def _queue(self, request: Request, matcher: Callable[[], Matcher | None]) -> list[Delta]:
        """Give a request to the engine, or return its refusal."""
        try:
            self.engine.add(request, matcher())
        except ValueError as error:
            return [refusal_of(request, str(error))]
        return []

    def _send(self, deltas: list[Delta]) -> None:
        """Send a step's deltas, with the counters if they are due or the last for a while."""
        now = time.monotonic()
        self._unreported = self._unreported or bool(deltas)
        due = now - self._reported > STATS_SECONDS or not self.engine.has_work()
        due = due and self._unreported
        if deltas or due:
            self.end.send(Deltas(deltas, self.engine.stats() if due else None))
        if due:
            self._reported, self._unreported = now, False


def refusal_of(request: Request, reason: str) -> Delta:
    """The only delta of a request that is not served."""
    return Delta(
        request_id=request.request_id,
        finish_reason="error",
        error=reason,
        prompt_tokens=len(request.prompt_ids),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
