"""The harness is stricter than production: strict dtype and rank promotion, warnings are errors."""

import os
from pathlib import Path

# Compiling outweighs running in these tests: no LLVM optimization (it halves the compile time),
# and what one test or child process compiled, the others and the next run load.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
)
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jax")
)

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("loaded", deadline=None)  # the machine's load fails no test
hypothesis.settings.load_profile("loaded")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config, items):
    """Deselect tests with needs of their own unless a -m expression asks for them."""
    if config.option.markexpr:
        return
    special = {"gpu", "slow", "browser", "notebooks"}
    kept = [item for item in items if not special & set(item.keywords)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session")
def golden():
    """Directory of the recorded outputs of independent implementations."""
    return Path(__file__).parent / "golden"
