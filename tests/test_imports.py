"""Imports point one way: serve, engine, executor, model, pallas_kernels; hosts need no jax."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("k3jax", "pallas_kernels")

# Lower may not import higher. A module takes the level of its longest listed prefix.
LEVELS = {
    "pallas_kernels": 0,
    "k3jax": 1,
    "k3jax.config": 1,
    "k3jax.request": 1,
    "k3jax.pages": 1,
    "k3jax.prefix": 1,
    "k3jax.tokenizer": 1,
    "k3jax.tokenizer_json": 2,
    "k3jax.chat": 2,
    "k3jax.parallel": 1,
    "k3jax.params": 2,
    "k3jax.cache": 2,
    "k3jax.model": 3,
    "k3jax.sampling": 2,
    "k3jax.checkpoint": 3,
    "k3jax.convert": 4,
    "k3jax.decode": 4,
    "k3jax.speculative": 4,
    "k3jax.speculative_model": 4,
    "k3jax.snapshots": 4,
    "k3jax.scheduler": 5,
    "k3jax.flight": 6,
    "k3jax.keeper": 6,
    "k3jax.engine": 6,
    "k3jax.lm": 7,
    "k3jax.explore": 8,
    "k3jax.serve": 8,
}
# What may import jax; everything else may not.
WITH_JAX = (
    "pallas_kernels",
    "k3jax.cache",
    "k3jax.checkpoint",
    "k3jax.convert",
    "k3jax.decode",
    "k3jax.engine",
    "k3jax.flight",
    "k3jax.explore",
    "k3jax.lm",
    "k3jax.model",
    "k3jax.parallel",
    "k3jax.params",
    "k3jax.sampling",
    "k3jax.serve.ranks",
    "k3jax.serve.worker",
    "k3jax.snapshots",
    "k3jax.speculative",
    "k3jax.speculative_model",
)
WITHOUT_JAX = (  # inside what is named above
    "k3jax.decode.config",
    "k3jax.decode.faults",
    "k3jax.decode.kinds",
    "k3jax.decode.reasons",
    "k3jax.decode.watchdog",
)


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path, *, top_level_only=False):
    """Dotted names that the file imports; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name, parents):
    """The longest of `parents` that a module is or lies in; "" if there is none."""
    while name and name not in parents:
        name = name.rpartition(".")[0]
    return name


def level(name):
    return LEVELS[inside(name, LEVELS)]


def test_the_tables_name_modules_that_exist():
    names = {name for name, _ in modules()}
    assert {*LEVELS, *WITH_JAX, *WITHOUT_JAX} - names == set()


def test_imports_only_go_down():
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(path, top_level_only=True)
        if target.split(".")[0] in PACKAGES and level(target) > level(name)
    ]
    assert not wrong


def test_pallas_stays_behind_its_door():
    wrong = []
    for name, path in modules():
        for target in imported(path):
            if not target.startswith("jax.experimental.pallas"):
                continue
            triton = target.startswith("jax.experimental.pallas.triton")
            if (
                not name.startswith("pallas_kernels")
                or name.endswith("_reference")
                or (triton and name != "pallas_kernels.launch")
            ):
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_kernels_know_nothing_of_the_server():
    wrong = [
        f"{name} imports {target}"
        for name, path in modules()
        for target in imported(path)
        if name.startswith("pallas_kernels") and target.split(".")[0] == "k3jax"
    ]
    assert not wrong


def test_host_modules_need_no_jax():
    """One process imports them all and names the first that brought jax along."""
    tables = (*WITH_JAX, *WITHOUT_JAX)
    names = [name for name, _ in modules() if inside(name, tables) not in WITH_JAX]
    assert "k3jax.serve.front" in names
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if {'jax', 'jaxlib'} & sys.modules.keys():\n"
        "        sys.exit(f'{name} imports jax')"
    )
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
