"""Which AMD architecture a kernel is traced for, where that decides what its body is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_NAMED: ContextVar[str | None] = ContextVar("amd_arch", default=None)


@contextmanager
def traced_for(arch: str) -> Iterator[None]:
    """Trace kernels for `arch` ("gfx950", say), whatever GPU is here; for compiling without one."""
    token = _NAMED.set(arch)
    try:
        yield
    finally:
        _NAMED.reset(token)


def amd_arch() -> str | None:
    """The AMD architecture named by `traced_for`, else that of this process's GPU, if it is one."""
    named = _NAMED.get()
    if named is not None:
        return named
    found = str(getattr(jax.devices()[0], "compute_capability", "")).partition(":")[0]
    return found if found.startswith("gfx") else None
