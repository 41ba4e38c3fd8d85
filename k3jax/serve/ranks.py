"""Several processes, one rank each: the first decides, the others run what it sends.

jax.distributed joins them. Each step's batch goes over a host socket when it is dispatched, so it
is there one step ahead of the device. A rank that ends takes the others along: its sockets close at
once, and jax.distributed misses its heartbeat where a whole host goes.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import jax
import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from k3jax.cache import SlotInit
from k3jax.checkpoint.loading import open_checkpoint
from k3jax.config import K3Config
from k3jax.decode.agreement import agree, exchange
from k3jax.decode.batch import Batch, Step, StepOutput
from k3jax.decode.executor import Executor
from k3jax.decode.failstop import check_votes, has_landed
from k3jax.decode.reasons import BatchRows, Reason
from k3jax.decode.watchdog import end_process
from k3jax.sampling import SamplingRow
from k3jax.serve.link import WorkerSettings
from k3jax.snapshots import Resume

HEARTBEAT_SECONDS = 10  # a process that is silent for so long is dead
GRACE_SECONDS = 2.0  # from a lost connection to the end: an orderly one comes about meanwhile
POLL_MILLISECONDS = 200
LEAVE_SECONDS = 20  # that ranks wait for each other at an orderly end


class Array(msgspec.Struct, array_like=True):
    """A numpy array on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Admit(msgspec.Struct, tag=True):
    """A slot goes to a new request."""

    slot: int
    prompt_length: int
    row: dict[str, Array]


class Save(msgspec.Struct, tag=True):
    """A snapshot is to be taken."""

    slot: int
    position: int
    number: int


class Continue(msgspec.Struct, tag=True):
    """A slot goes on from a snapshot."""

    order: dict[str, Array]


class Run(msgspec.Struct, tag=True):
    """A step to run."""

    kind: str
    requests: int
    rows: int
    specialized: bool
    batch: dict[str, Array]


class Stop(msgspec.Struct, tag=True):
    """Nothing more comes."""


ToRank = Admit | Save | Continue | Run | Stop


def join(settings: WorkerSettings) -> None:
    """Make this process one of several ranks; call it before anything asks for devices.

    Raises ValueError if a process sees more devices than one, or fewer.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(
        settings.coordinator,
        settings.num_processes,
        settings.process_id,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=LEAVE_SECONDS,
    )
    if jax.local_device_count() != 1:
        raise ValueError(
            f"rank {settings.process_id} sees {jax.local_device_count()} devices: show each "
            "process one of its own (ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES)"
        )


def agree_on_checkpoint(path: str) -> None:
    """Raise ValueError on every rank if one of them cannot read its copy; needs no device."""
    reasons = []
    try:
        with open_checkpoint(path, K3Config.from_file(path)):
            pass
    except (ValueError, OSError) as error:
        reasons.append(str(error))
        print(f"k3jax: {error}", file=sys.stderr, flush=True)  # rank 0 may end before we raise
    if agreed := agree(reasons, "the checkpoint"):
        raise ValueError("; ".join(agreed))


class Peer:
    """A socket to one other process, and a thread that ends this process when that one is gone."""

    def __init__(self, context: zmq.Context, name: str, end: Callable[[str], None]) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_SECONDS // 4)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * HEARTBEAT_SECONDS)
        self._name, self._end = name, end
        self._leaving = threading.Event()
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watcher = threading.Thread(target=self._watch, args=(monitor,), daemon=True)
        self._watcher.start()

    def bind(self, host: str) -> str:
        """Listen on some port of `host`; its address."""
        self._socket.bind(f"tcp://{host}:*")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str) -> None:
        """Connect to an address that `bind` gave."""
        self._socket.connect(address)

    def send(self, data: bytes) -> None:
        """Send without waiting."""
        self._socket.send(data)

    def receive(self, milliseconds: int | None = None) -> ToRank | None:
        """The next message, whenever it comes; None if none comes in so many milliseconds."""
        if not self._socket.poll(milliseconds):
            return None
        return msgspec.msgpack.decode(self._socket.recv(), type=ToRank)

    def leave(self) -> None:
        """From now on the other one may go."""
        self._leaving.set()
        self._watcher.join()

    def close(self) -> None:
        """Leave, and free the socket; what was sent may still go its way."""
        self.leave()
        self._socket.close(linger=1000 * LEAVE_SECONDS)

    def _watch(self, monitor: zmq.Socket) -> None:
        while not self._leaving.is_set():
            lost = monitor.poll(POLL_MILLISECONDS)
            if lost and recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                if not self._leaving.wait(GRACE_SECONDS):
                    self._end(f"{self._name} ended; its own log says why. Restart all ranks")
                break
        # In this order: libzmq would wait for ever to say something to a monitor that is closed.
        self._socket.disable_monitor()
        monitor.close(linger=0)


class Leader:
    """The executor of rank 0, whose calls the other ranks repeat (see `engine.Runs`)."""

    def __init__(
        self, executor: Executor, coordinator: str, *, end: Callable[[str], None] = end_process
    ) -> None:
        """Returns when every rank has compiled its steps and knows where to connect.

        `coordinator` is HOST:PORT of jax.distributed. `end` is told when a rank is gone.
        """
        self.executor, self.sizes = executor, executor.sizes
        self._context = zmq.Context()
        host = socket.gethostbyname(coordinator.rpartition(":")[0])
        ranks = range(1, jax.process_count())
        self._peers = [Peer(self._context, f"rank {rank}", end) for rank in ranks]
        addresses = [peer.bind(host) for peer in self._peers]
        exchange(json.dumps(addresses), "where ranks meet")

    def plan(self, batch: BatchRows) -> Step | None:
        return self.executor.plan(batch)

    def reason(self, batch: BatchRows) -> Reason | None:
        return self.executor.reason(batch)

    def admit(self, slot: int, init: SlotInit) -> None:
        row = {name: packed(value) for name, value in vars(init.sampling).items()}
        self._send(Admit(slot, int(init.prompt_length), row))
        self.executor.admit(slot, init)

    def save(self, slot: int, position: int, number: int) -> None:
        self._send(Save(slot, position, number))
        self.executor.save(slot, position, number)

    def resume(self, order: Resume) -> None:
        self._send(Continue({name: packed(value) for name, value in vars(order).items()}))
        self.executor.resume(order)

    def run(self, step: Step, batch: Batch) -> StepOutput:
        arrays = {name: packed(value) for name, value in vars(batch).items() if value is not None}
        self._send(Run(step.kind, step.requests, step.rows, step.specialized, arrays))
        return self.executor.run(step, batch)

    def stop(self) -> None:
        """Let the other ranks end in order, and leave jax.distributed together."""
        for peer in self._peers:
            peer.leave()
        self._send(Stop())
        jax.distributed.shutdown()
        for peer in self._peers:
            peer.close()
        self._context.term()

    def _send(self, message: ToRank) -> None:
        data = msgspec.msgpack.encode(message)
        for peer in self._peers:
            peer.send(data)


def follow(executor: Executor, landing: Callable[[int], AbstractContextManager[None]]) -> None:
    """Repeat what rank 0 does until it says stop; RuntimeError if the ranks vote for it.

    `landing(n)` is entered around the blocking read of step n's results. As in the engine one step
    is dispatched before the one before it is read; if none comes, it is read once it has landed,
    since rank 0 may stop by its votes before it sends another.
    """
    addresses = json.loads(exchange("", "where ranks meet")[0])
    context = zmq.Context()
    peer = Peer(context, "rank 0", end_process)
    peer.connect(addresses[jax.process_index() - 1])
    flight: StepOutput | None = None
    steps = 0
    while True:
        message = peer.receive(None if flight is None else POLL_MILLISECONDS)
        if isinstance(message, Stop):
            break
        if isinstance(message, Admit | Save | Continue):
            prepare(executor, message)
            continue
        before = flight
        if message is not None:
            flight = executor.run(step_of(message), batch_of(message))
        elif before is not None and has_landed(before.tokens):
            flight = None
        else:
            continue
        if before is not None:
            with landing(steps):
                land(before)
        steps += message is not None
    peer.leave()
    if flight is not None:
        land(flight)
    jax.distributed.shutdown()
    peer.close()
    context.term()


def prepare(executor: Executor, message: Admit | Save | Continue) -> None:
    """Do what comes between steps."""
    if isinstance(message, Admit):
        row = SamplingRow(**{name: unpacked(value) for name, value in message.row.items()})
        executor.admit(message.slot, SlotInit(np.int32(message.prompt_length), row))
    elif isinstance(message, Save):
        executor.save(message.slot, message.position, message.number)
    else:
        executor.resume(Resume(**{k: unpacked(value) for k, value in message.order.items()}))


def land(output: StepOutput) -> None:
    """Wait for a step, and heed the votes that came with it."""
    np.asarray(output.tokens)
    if output.votes is not None:
        check_votes(np.asarray(output.votes))


def step_of(message: Run) -> Step:
    """The key of the step to run."""
    kind: Any = message.kind
    return Step(kind, message.requests, message.rows, message.specialized)


def batch_of(message: Run) -> Batch:
    """The batch to run it on."""
    given = {name: unpacked(value) for name, value in message.batch.items()}
    return Batch(**{field.name: given.get(field.name) for field in fields(Batch)})


def packed(value: Any) -> Array:
    """A numpy array or scalar as bytes."""
    array = np.asarray(value)
    return Array(array.dtype.str, array.shape, array.tobytes())


def unpacked(array: Array) -> np.ndarray:
    """What `packed` made, read only."""
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)
