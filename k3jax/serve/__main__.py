"""`python -m k3jax.serve`: an OpenAI-compatible server of one checkpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from k3jax.bundled import NAME, bundled_model
from k3jax.config import K3Config
from k3jax.decode.config import BACKENDS, DTYPES, IMPLS, DecodeConfig
from k3jax.decode.faults import KINDS, Fault
from k3jax.serve.front import Front, FrontSettings
from k3jax.serve.limits import add_flags, limits_of
from k3jax.serve.link import WorkerSettings

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; 2 if the model or the address is wrong.

    A process above 0 becomes an engine without a front.
    """
    try:
        settings = front_settings(arguments)
        if settings.worker.process_id:
            text = msgspec.json.encode(settings.worker).decode()
            os.execv(settings.worker_command[0], [*settings.worker_command, text])
        front = Front(settings)
    except (ValueError, OSError) as error:
        print(f"k3jax: {error}", file=sys.stderr)
        return 2
    return asyncio.run(front.run())


def front_settings(arguments: Sequence[str] | None = None) -> FrontSettings:
    """Settings from the command line; SystemExit for a wrong flag, an error for a wrong model."""
    given = _parser().parse_args(arguments)
    model = bundled_model() if given.model is None else Path(given.model)
    if not model.is_dir():
        raise FileNotFoundError(f"--model {model} is not a directory with a checkpoint")
    if given.inject_fault is not None:
        Fault.parse(given.inject_fault)
    _check_drafter(given)
    _check_processes(given)
    positions = K3Config.from_file(model).max_positions
    if given.max_context is not None and given.max_context > positions:
        raise ValueError(f"--max-context {given.max_context} exceeds the model's {positions}")
    worker = WorkerSettings(
        address="",
        parent=0,
        model=str(model),
        coordinator=given.coordinator,
        num_processes=given.num_processes,
        process_id=given.process_id,
        dtype=given.dtype,
        tp=given.tp,
        max_requests=given.max_requests,
        max_context=given.max_context,
        page_size=given.page_size,
        cache_memory=given.cache_memory,
        prefix_cache=given.prefix_cache,
        decode_backend=given.decode_backend,
        impl=given.impl,
        num_spec=given.num_spec,
        drafter=given.drafter,
        builds=given.builds,
        step_timeout=given.step_timeout,
        inject_fault=given.inject_fault,
        compile_cache=None if given.compile_cache == "none" else given.compile_cache,
    )
    return FrontSettings(
        model=model,
        served_name=given.served_model_name or model.resolve().name,
        host=given.host,
        port=given.port,
        drain_seconds=given.drain_seconds,
        restarts=given.on_fault == "restart",
        worker=worker,
        limits=limits_of(given),
    )


def _check_drafter(given: argparse.Namespace) -> None:
    """Raise ValueError for drafts that nobody makes, or a drafter that is not there."""
    drafter = given.drafter or "none"
    if drafter == "none":
        if given.num_spec is not None:
            raise ValueError(f"--num-spec {given.num_spec} needs a --drafter: ngram, or a model's")
        return
    if given.num_spec is None:
        raise ValueError(f"--drafter {drafter} needs --num-spec: the most drafts in a step, as 3")
    if drafter != "ngram" and not Path(drafter).is_dir():
        raise FileNotFoundError(f"--drafter {drafter} is not none, ngram or a draft model's folder")


def _check_processes(given: argparse.Namespace) -> None:
    """Raise ValueError unless there is one process for each rank, or only one at all."""
    count, number = given.num_processes, given.process_id
    if given.coordinator is None:
        if count != 1 or number:
            raise ValueError("--num-processes and --process-id need --coordinator HOST:PORT")
        return
    if given.on_fault == "restart":
        raise ValueError("--on-fault restart is for one process: let a supervisor start all ranks")
    if not re.fullmatch(r".+:\d+", given.coordinator):
        raise ValueError(f"--coordinator {given.coordinator} is not like HOST:PORT")
    if count != given.tp or not 0 <= number < count:
        raise ValueError(
            f"--tp {given.tp} has one process for each rank, but there are --num-processes {count} "
            f"and --process-id {number} (from 0)"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m k3jax.serve", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR", help=f"checkpoint, as released or converted (default: {NAME})")
    add("--served-model-name", metavar="NAME", help="default: the directory's name")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="0: any free one (default: %(default)s)")
    _add_engine_flags(parser)
    add(
        "--on-fault",
        choices=("exit", "restart"),
        default="exit",
        help="when the engine dies: the server ends, or starts another (default: %(default)s)",
    )
    add(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="that open requests get to end after SIGTERM (default: %(default)s)",
    )
    add_flags(parser)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of WorkerSettings."""
    add = parser.add_argument

    def run(flag: str, text: str, **options: Any) -> None:
        """A flag of DecodeConfig, whose default holds where none is given."""
        default = getattr(DecodeConfig, flag.removeprefix("--").replace("-", "_"))
        add(flag, help=f"{text} (default: {default})", **options)

    add(
        "--dtype",
        help="of activations and latents (default: bfloat16; on a CPU float32, the faster)",
        choices=DTYPES,
    )
    run("--tp", "ranks of tensor parallelism", type=_count, metavar="N")
    run("--max-requests", "requests that run at a time", type=_count, metavar="N")
    run("--max-context", "tokens of a request, answer included", type=_count, metavar="N")
    run("--page-size", "tokens of a page of the latent cache", type=_count, metavar="N")
    run("--decode-backend", "of decode steps", choices=BACKENDS)
    run("--impl", "of prefill and specialized decode; none: compiled on a GPU", choices=IMPLS)
    run("--num-spec", "most drafts of a request in a step", type=_count, metavar="N")
    run(
        "--drafter",
        "who drafts: ngram looks the text's end up in the text, a directory is a draft model's",
        metavar="none|ngram|MODEL",
    )
    run("--step-timeout", "seconds for a step until the engine ends", type=_seconds, metavar="S")
    run(
        "--inject-fault",
        f"to see what happens: one of {', '.join(KINDS)} on a rank in a step from 1",
        metavar="RANK:STEP:BIT",
    )
    add(
        "--cache-memory",
        type=_memory,
        metavar="BYTES",
        help="on each device, as 512MiB or 20G (default: what is left)",
    )
    add(
        "--prefix-cache",
        type=_prefix_cache,
        metavar="BYTES|off",
        help="of that, for prefixes of earlier requests (default: a share of it)",
    )
    add(
        "--builds",
        type=_builds,
        metavar="QxREQUESTS,...",
        help="decode steps to compile: rows of each request x requests, as 1x1,1x8",
    )
    add("--coordinator", metavar="HOST:PORT", help="of process 0, if each rank is a process")
    add("--num-processes", type=_count, default=1, metavar="N", help="as many as --tp")
    add("--process-id", type=_number, default=0, metavar="I", help="0 has the HTTP front")
    add(
        "--compile-cache",
        metavar="DIR",
        default=str(_cache_home() / "k3jax"),
        help="keep compiled steps there for the next start; none: do not (default: %(default)s)",
    )


def _cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (0 to 65535)")
    return int(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)


def _memory(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?|)B?", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount like 512MiB, 20G or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def _prefix_cache(text: str) -> int:
    try:
        return 0 if text == "off" else _memory(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor off") from error


def _builds(text: str) -> list[tuple[int, int]]:
    builds = []
    for build in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)\s*", build)
        if match is None or int(match[1]) < 1 or int(match[2]) < 1:
            raise argparse.ArgumentTypeError(f"{build!r} is not like 1x8 (rows x requests)")
        builds.append((int(match[1]), int(match[2])))
    return builds


if __name__ == "__main__":
    sys.exit(main())
