"""The engine child of the server: `python -m k3jax.serve.worker SETTINGS`, started by the front.

It loads the model, compiles every step, then lives between two calls: take messages, step the
engine. It ends with Fatal and a non-zero status on any error, and by itself if the front dies.
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
from pathlib import Path

import jax
import msgspec

from k3jax.checkpoint.loading import LoadProgress, load_params
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.executor import Executor
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.request import Delta
from k3jax.serve.link import (
    Abort,
    Add,
    Deltas,
    EngineEnd,
    Fatal,
    Progress,
    Ready,
    ReadyInfo,
    WorkerSettings,
)

PACKAGE = Path(__file__).resolve().parent.parent
IDLE_SECONDS = 1.0  # between two looks at the parent when there is nothing to do
STATS_SECONDS = 0.25  # between two reports of the counters while steps run


def main(arguments: list[str]) -> int:
    """Serve until the front says so; the status is 0 after a shutdown, 2 for wrong arguments."""
    if len(arguments) != 1:
        print("usage: python -m k3jax.serve.worker SETTINGS  (started by k3jax.serve)")
        return 2
    settings = msgspec.json.decode(arguments[0], type=WorkerSettings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front gets it too, and shuts us down
    end_with_parent(settings.parent)
    end = EngineEnd(settings)
    try:
        executor, engine = build(settings, lambda text: end.send(Progress(text)))
        end.send(Ready(describe(settings, engine, executor.compilations)))
        gc.collect()
        gc.freeze()  # what is loaded stays: no collection need walk it
        Server(engine, end).run()
    except BaseException as error:
        if is_refusal(error):
            end.send(Fatal(str(error)))
            return 1
        end.send(Fatal(f"{type(error).__name__}: {error}"))
        raise
    finally:
        end.close()
    return 0


def is_refusal(error: BaseException) -> bool:
    """Whether an error is what this package itself has to say of a model or a setting.

    It says all there is to say; a traceback helps with the others.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)
    return isinstance(error, OSError) or (isinstance(error, ValueError) and own)


def end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, also while it loads or compiles."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def build(settings: WorkerSettings, report: Callable[[str], None]) -> tuple[Executor, Engine]:
    """Load the model and compile its steps; ValueError names what is wrong with either."""
    decode_config = decode_config_of(settings)
    if decode_config.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", decode_config.compile_cache)
    config = K3Config.from_file(settings.model)
    mesh = make_mesh(decode_config.tp)

    def loaded(state: LoadProgress) -> None:
        report(
            f"loaded {state.group} ({state.groups_done} of {state.groups}), "
            f"{state.bytes_done / 1e9:.2f} GB at {state.gb_per_second:.2f} GB/s"
        )

    params = load_params(settings.model, config, mesh, progress=loaded)
    executor = Executor(params, config, decode_config, mesh, progress=report)
    return executor, Engine(executor, config, decode_config, end_ids=settings.end_ids or None)


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
    )


class Server:
    """The loop between the socket and the engine."""

    def __init__(self, engine: Engine, end: EngineEnd) -> None:
        self.engine = engine
        self.end = end
        self.draining = False
        self._reported = 0.0
        self._unreported = False

    def run(self) -> None:
        """Step while there is work, wait for messages while there is none."""
        while True:
            refused: list[Delta] = []
            for message in self.end.receive(0.0 if self.engine.has_work() else IDLE_SECONDS):
                if isinstance(message, Add):
                    refused += self._add(message)
                elif isinstance(message, Abort):
                    self.engine.abort(message.request_id)
                elif message.drain:
                    self.draining = True
                else:
                    return
            self._send(refused + (self.engine.step() if self.engine.has_work() else []))
            if self.draining and not self.engine.has_work():
                return

    def _add(self, message: Add) -> list[Delta]:
        """Queue a request, or return its refusal."""
        request = message.request
        try:
            if self.draining:
                raise ValueError("the server is shutting down")
            self.engine.add(request)
        except ValueError as error:
            name, tokens = request.request_id, len(request.prompt_ids)
            return [
                Delta(
                    request_id=name, finish_reason="error", error=str(error), prompt_tokens=tokens
                )
            ]
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
