"""`python -m k3jax.doctor [MODEL] [--tp N]`: what of this machine would slow down or break serving.

It looks at versions, devices, memory and settings, and says a remedy with each warning. The server
says the same warnings when it starts. The checks are pure functions of `Facts`, with no jax.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from k3jax.config import K3Config
from k3jax.logical import check_tp
from k3jax.sizes import bytes_per_rank

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "jax-rocm7-plugin",
    "jax-rocm7-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
)
COMPILED_FOR = ("gfx942", "gfx950")
OLDEST_JAX, NEWEST_JAX = (0, 10, 2), (0, 13)  # the newest is the first that is not supported
COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer"
SHARED_MEMORY = 1 << 30  # bytes that RCCL and NCCL want in /dev/shm


@dataclass(frozen=True)
class Device:
    """A GPU as JAX sees it."""

    kind: str  # as AMD Instinct MI355X
    architecture: str  # gfx950, or a compute capability such as 9.0
    memory: int  # bytes that JAX may take


@dataclass(frozen=True)
class Facts:
    """What the checks look at."""

    versions: Mapping[str, str]  # of the installed ones of PACKAGES
    platform: str  # rocm, cuda or cpu: what JAX runs on
    devices: Sequence[Device] = ()
    device_count: int | None = None  # of all processes together, of any platform; None: unknown
    rocm: str | None = None  # release of ROCm
    environment: Mapping[str, str] = field(default_factory=dict)
    amd_device: bool | None = None  # /dev/kfd: whether it may be opened; None: there is none
    nvidia_device: bool = False  # /dev/nvidia0 exists
    numa_balancing: bool = False
    shared_memory: int | None = None  # bytes of /dev/shm


@dataclass(frozen=True)
class Wish:
    """What shall be run: the model's config, if it is known, and the ranks."""

    config: K3Config | None = None
    tp: int = 1


Warnings = Iterator[str]


def warnings_of(facts: Facts, wish: Wish | None = None) -> list[str]:
    """Every warning, each with its remedy; empty if there is nothing to say."""
    wish = wish or Wish()
    return [text for check in CHECKS for text in check(facts, wish)]


def check_versions(facts: Facts, wish: Wish) -> Warnings:
    """Versions that were never tried, or that do not go together."""
    jax = facts.versions.get("jax", "0")
    if not OLDEST_JAX <= numbers(jax) < NEWEST_JAX:
        yield f"JAX {jax} is not supported: install 'jax>=0.10.2,<0.13'"
    for name, version in facts.versions.items():
        if name not in ("jax", "flax") and numbers(version)[:3] != numbers(jax)[:3]:
            yield f"{name} {version} beside JAX {jax}: install '{name}=={jax}'"
    flax = facts.versions.get("flax", "0")
    if numbers(jax) >= (0, 11) and numbers(flax) < (0, 12, 12):
        yield f"flax {flax} does not know JAX {jax}: install 'flax>=0.12.12'"


def check_platform(facts: Facts, wish: Wish) -> Warnings:
    """A GPU that JAX does not see, or may not open."""
    if facts.amd_device is False:
        yield "/dev/kfd cannot be opened: add the user to the groups render and video"
    if facts.platform != "cpu":
        return
    for there, extra in ((facts.amd_device is not None, "rocm"), (facts.nvidia_device, "cuda")):
        if not there:
            continue
        forced = facts.environment.get("JAX_PLATFORMS")
        if forced:
            yield f"a GPU is there, but JAX_PLATFORMS={forced} hides it: unset it"
        else:
            yield f"a GPU is there, but JAX has no plugin for it: pip install 'k3jax[{extra}]'"


def check_devices(facts: Facts, wish: Wish) -> Warnings:
    """GPUs that differ, or that no kernel was compiled for."""
    if facts.platform == "cpu":
        return
    kinds = sorted({device.kind for device in facts.devices})
    if len(kinds) > 1:
        yield f"GPUs of several kinds ({', '.join(kinds)}): ranks may choose different experts"
    for found in sorted({device.architecture for device in facts.devices}):
        if facts.platform == "rocm" and found not in COMPILED_FOR:
            yield (
                f"the kernels were never compiled for {found}, only for "
                f"{' and '.join(COMPILED_FOR)}: --decode-backend stock runs anywhere"
            )
        if facts.platform == "cuda" and numbers(found) < (9, 0):
            yield f"the kernels were never run on compute capability {found}, only on 9.0"


def check_ranks(facts: Facts, wish: Wish) -> Warnings:
    """Ranks that the model does not divide into, or that have no device."""
    if facts.device_count is not None and facts.device_count < wish.tp:
        yield (
            f"--tp {wish.tp} needs {wish.tp} devices, JAX sees {facts.device_count} here: lower "
            "it, or start a process for each (--coordinator)"
        )
    try:
        if wish.config is not None:
            check_tp(wish.config, wish.tp)
    except ValueError as error:
        yield f"{error}: choose another --tp"


def check_command_buffers(facts: Facts, wish: Wish) -> Warnings:
    """Launches in command buffers: known crashes, and what it costs to do without."""
    if facts.platform == "cpu":
        return
    given = xla_flag(facts, COMMAND_BUFFERS)
    kinds = None if given is None else {kind for kind in given.upper().split(",") if kind}
    if kinds == set():
        yield (
            "command buffers are off: each of some thousand launches a step costs about 4 us more. "
            f"Leave {COMMAND_BUFFERS} out of XLA_FLAGS, or name kinds (FUSION,CUSTOM_CALL)"
        )
        return
    if kinds and "COLLECTIVES" in kinds and wish.tp > 1:
        yield (
            "collectives in command buffers stop moving after some hundred steps: take COLLECTIVES "
            f"out of {COMMAND_BUFFERS}"
        )
    safe = f"XLA_FLAGS={COMMAND_BUFFERS}=FUSION,CUSTOM_CALL"
    if facts.platform == "rocm" and facts.rocm and numbers(facts.rocm)[:3] == (7, 2, 0):
        yield (
            "ROCm 7.2.0 crashes when command buffers run (openxla/xla#40405): install 7.2.1, or "
            f"set XLA_FLAGS={COMMAND_BUFFERS}="
        )
        return
    loops = kinds is None or "WHILE" in kinds
    crashes = any(device.architecture == "gfx950" for device in facts.devices)
    if facts.rocm and numbers(facts.rocm) < (7, 2) and crashes and loops:
        yield (
            f"ROCm {facts.rocm} crashes on gfx950 when a loop runs in a command buffer "
            f"(openxla/xla#46952): set {safe}"
        )


def check_memory(facts: Facts, wish: Wish) -> Warnings:
    """A model that does not fit, and memory that JAX leaves alone."""
    if facts.platform == "cpu":
        return
    environment = facts.environment
    fraction = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get(
        "XLA_PYTHON_CLIENT_MEM_FRACTION"
    )
    memory = min((device.memory for device in facts.devices), default=0)
    if fraction is None:
        yield (
            "JAX takes three quarters of a GPU's memory, and the cache no more than is left of "
            "that: set XLA_PYTHON_CLIENT_MEM_FRACTION=.95 if nothing else runs there"
        )
    if wish.config is None or not memory:
        return
    try:
        weights = bytes_per_rank(wish.config, wish.tp)
    except ValueError:
        return  # check_ranks says why
    if weights > memory:
        yield (
            f"the weights take {weights / 1e9:.1f} GB on each of {wish.tp} ranks, JAX has "
            f"{memory / 1e9:.1f} GB there: raise --tp or XLA_PYTHON_CLIENT_MEM_FRACTION"
        )


def check_host(facts: Facts, wish: Wish) -> Warnings:
    """Settings of the machine that cost time, or ranks their connection."""
    if facts.platform == "rocm" and facts.numa_balancing:
        yield (
            "automatic NUMA balancing stalls GPU work: "
            "sudo sh -c 'echo 0 > /proc/sys/kernel/numa_balancing'"
        )
    if facts.platform == "cpu" or wish.tp == 1:
        return
    if facts.shared_memory is not None and facts.shared_memory < SHARED_MEMORY:
        yield (
            f"/dev/shm has {facts.shared_memory / 2**20:.0f} MiB, too few for collectives between "
            "processes: docker run --ipc host, or --shm-size 16g"
        )


Check = Callable[[Facts, Wish], Warnings]
CHECKS: tuple[Check, ...] = (
    check_versions,
    check_platform,
    check_devices,
    check_ranks,
    check_command_buffers,
    check_memory,
    check_host,
)


def numbers(version: str) -> tuple[int, ...]:
    """The leading whole numbers of a version: 7.1.0-rc1 -> (7, 1, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def xla_flag(facts: Facts, name: str) -> str | None:
    """The last value of a flag in XLA_FLAGS; None if it is not there."""
    given = facts.environment.get("XLA_FLAGS", "").split()
    values = [text.partition("=")[2] for text in given if text.partition("=")[0] == name]
    return values[-1] if values else None


def gather() -> Facts:
    """Look at this machine; starts JAX's backend."""
    import jax

    devices = jax.local_devices()
    platform = devices[0].platform
    if platform == "gpu":
        version = getattr(devices[0].client, "platform_version", "")
        platform = "rocm" if "rocm" in version.lower() else "cuda"
    kfd = Path("/dev/kfd")
    return Facts(
        versions=dict(installed()),
        platform=platform,
        devices=[device_of(device) for device in devices] if platform != "cpu" else (),
        device_count=jax.device_count(),
        rocm=text_of("/opt/rocm/.info/version"),
        environment=os.environ,
        amd_device=os.access(kfd, os.R_OK | os.W_OK) if kfd.exists() else None,
        nvidia_device=Path("/dev/nvidia0").exists(),
        numa_balancing=text_of("/proc/sys/kernel/numa_balancing") == "1",
        shared_memory=size_of("/dev/shm"),
    )


def installed() -> Iterator[tuple[str, str]]:
    """The packages of PACKAGES that are installed, and their versions."""
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def device_of(device: Any) -> Device:
    """What JAX says of a GPU."""
    stats = device.memory_stats() or {}
    architecture = str(getattr(device, "compute_capability", "unknown"))
    memory = int(stats.get("bytes_limit", 0))
    return Device(device.device_kind, architecture.partition(":")[0], memory)


def text_of(path: str) -> str | None:
    """A short file without its line end; None if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def size_of(path: str) -> int | None:
    """Bytes of the file system at a path; None if there is none."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return stats.f_blocks * stats.f_frsize


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was found and the warnings; 1 if there are any, 2 for a model that is none."""
    parser = argparse.ArgumentParser(prog="python -m k3jax.doctor", description=__doc__)
    parser.add_argument("model", nargs="?", help="checkpoint directory: does it fit?")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks to run it on")
    given = parser.parse_args(arguments)
    try:
        config = None if given.model is None else K3Config.from_file(given.model)
    except (ValueError, OSError) as error:
        print(f"k3jax: {error}", file=sys.stderr)
        return 2
    facts = gather()
    release = f" (ROCm {facts.rocm})" if facts.platform == "rocm" and facts.rocm else ""
    print(f"platform  {facts.platform}{release}")
    for device in facts.devices:
        print(
            f"device    {device.kind} {device.architecture}, {device.memory / 1e9:.1f} GB for JAX"
        )
    for name, version in facts.versions.items():
        print(f"package   {name} {version}")
    found = warnings_of(facts, Wish(config, given.tp))
    for text in found:
        print(f"warning   {text}")
    print({0: "no warnings", 1: "1 warning"}.get(len(found), f"{len(found)} warnings"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
