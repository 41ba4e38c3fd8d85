"""Compile the kernels for AMD GPUs on a machine that has none, and print what they use.

`python -m pallas_kernels.aot [--arch gfx950 gfx942] [--case TEXT] [--tags decode ..]`: lowers each
GPU case for ROCm, takes the Triton IR out of the module, and compiles it with PyPI triton's AMD
backend. The exit status is 1 if a case breaks a rule of `faults`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import sharding

from pallas_kernels.aot_compile import LDS_BYTES
from pallas_kernels.target import traced_for

ARCHS = ("gfx950", "gfx942")
DOT_OPS = {
    "attn_res", "choose_beside", "kda_prefill", "linear", "linears", "mla_absorb", "mla_decode",
    "mla_prefill", "mla_values", "moe_mono", "moe_mxfp4", "route",
}  # fmt: skip
WITHOUT_PRODUCTS = {"attn_res_rows", "route_top_k"}  # kernels of these ops
COLUMNS = (
    "programs", "warps", "vgprs", "agprs", "spills", "scratch", "lds", "mfma", "fp4", "code",
    "waves", "load_bytes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LoweredKernel:
    """One Triton kernel of a lowered function: its IR as text and its launch parameters."""

    name: str
    text: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int


def lower_rocm(function: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    """Lower `function` for ROCm; `args` are arrays or ShapeDtypeStructs. No GPU is needed."""
    if hasattr(sharding, "AbstractDevice") and hasattr(sharding, "use_abstract_mesh"):
        # From JAX 0.11 on, the lowering asks which device it is for.
        device = sharding.AbstractDevice("gfx950", 256, "rocm")
        kinds = (sharding.AxisType.Auto,)  # under explicit axes every array would need a sharding
        mesh = sharding.AbstractMesh((1,), ("aot",), axis_types=kinds, abstract_device=device)
        with sharding.use_abstract_mesh(mesh):
            return jax.jit(function).trace(*args).lower(lowering_platforms=("rocm",))
    return jax.jit(function).trace(*args).lower(lowering_platforms=("rocm",))


def _triton_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield from _triton_calls(child.operation)
                if child.operation.name == "stablehlo.custom_call":
                    target = child.operation.attributes["call_target_name"].value
                    if target == "__gpu$xla.gpu.triton":
                        yield child.operation


def triton_kernels(lowered: jax.stages.Lowered) -> list[LoweredKernel]:
    """The Triton kernels of a module lowered for a GPU, each once, in program order."""
    # jaxlib alone can read the bytecode: it is tied to jaxlib's version of the dialect.
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    kernels: dict[tuple, LoweredKernel] = {}
    module: Any = lowered.compiler_ir()
    for call in _triton_calls(module.operation):
        config = call.attributes["mhlo.backend_config"]
        context = ir.Context()
        context.allow_unregistered_dialects = True
        dialect.register_dialect(context)
        with context:
            text = str(ir.Module.parse(config["ir"].value_bytes))
        # A cache hint, which triton 3.9 spells otherwise.
        text = re.sub(r" evictionPolicy = \w+", "", text)
        # The barrier's bytecode properties, which jaxlib prints raw.
        text = re.sub(r'"gpu\.barrier"\(\) <.*?> : \(\) -> \(\)', "gpu.barrier", text)
        grid = tuple(config[f"grid_{axis}"].value for axis in "xyz")
        kernel = LoweredKernel(
            name=config["name"].value,
            text=text,
            grid=grid,  # type: ignore[arg-type]
            num_warps=config["num_warps"].value,
            num_stages=config["num_stages"].value,
        )
        kernels.setdefault((kernel.name, kernel.text), kernel)
    return list(kernels.values())


class AmdCompiler:
    """A child process that compiles Triton IR; `python` is an interpreter that has triton."""

    def __init__(self, python: str = sys.executable):
        script = Path(__file__).with_name("aot_compile.py")
        self._directory = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [python, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": self._directory.name, "HOME": "/tmp"},
        )

    def __enter__(self) -> AmdCompiler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()
        self._directory.cleanup()

    def __call__(self, kernel: LoweredKernel, arch: str, assembly: str | None = None) -> dict:
        """Resources of `kernel` on `arch`, or {"error": text}; `assembly` names a file to write."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the compiler process has no pipes")
        path = Path(self._directory.name) / "kernel.ttir"
        path.write_text(kernel.text)
        request = {
            "path": str(path),
            "arch": arch,
            "warps": kernel.num_warps,
            "stages": kernel.num_stages,
            "assembly": assembly,
        }
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            return {"error": "the compiler process died"}
        return json.loads(answer)


def compile_function(
    function: Callable[..., Any], *args: Any, compiler: AmdCompiler, archs: Sequence[str] = ARCHS
) -> list[dict]:
    """One row per kernel of `function` and architecture: name, arch, grid, warps, resources."""
    rows = []
    for arch in archs:
        with traced_for(arch):  # a function of its own, or jit would take what it traced before
            lowered = lower_rocm(functools.partial(function), *args)
        for kernel in triton_kernels(lowered):
            row = {
                "kernel": kernel.name,
                "arch": arch,
                "programs": kernel.grid[0] * kernel.grid[1] * kernel.grid[2],
                "warps": kernel.num_warps,
            }
            rows.append(row | compiler(kernel, arch))
    return rows


def faults(op: str, tags: frozenset[str], rows: Sequence[dict]) -> list[str]:
    """What is wrong with the rows of one case: errors, spills at decode, LDS, no matrix unit."""
    found = []
    for row in rows:
        where = f"{row['kernel']} on {row['arch']}"
        if "error" in row:
            found.append(f"{where}: {row['error']}")
            continue
        if "decode" in tags and (row["spills"] or row["scratch"]):
            found.append(f"{where}: {row['spills']} spills, {row['scratch']} bytes of scratch")
        if row["lds"] > LDS_BYTES[row["arch"]]:
            found.append(f"{where}: {row['lds']} bytes of LDS, {LDS_BYTES[row['arch']]} exist")
    multiplying = [row for row in rows if row["kernel"] not in WITHOUT_PRODUCTS]
    for arch in {row["arch"] for row in multiplying}:
        if op in DOT_OPS and not any(row.get("mfma") for row in multiplying if row["arch"] == arch):
            found.append(f"{op} on {arch}: no matrix instruction")
    return found


def compile_case(case: Any, dtype: Any, compiler: AmdCompiler, archs: Sequence[str]) -> list[dict]:
    """The rows of a case of cases.py."""
    from pallas_kernels.case_inputs import bind, inputs

    shapes = jax.eval_shape(functools.partial(inputs, case, dtype))
    return compile_function(bind(case, "pallas"), shapes, compiler=compiler, archs=archs)


def main() -> int:
    """Compile the cases that the command line selects and print the table."""
    from pallas_kernels.cases import CASES

    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("--arch", nargs="+", default=ARCHS, choices=ARCHS)
    parser.add_argument("--case", default="", help="cases whose name holds this text")
    parser.add_argument("--tags", nargs="*", default=[], help="cases that carry all these tags")
    parser.add_argument("--triton", default=sys.executable, help="an interpreter that has triton")
    arguments = parser.parse_args()
    tags = {"gpu", *arguments.tags}
    cases = [case for case in CASES if case.tags >= tags and arguments.case in str(case)]
    if not cases:
        parser.error(f"no case has the tags {sorted(tags)} and {arguments.case!r} in its name")
    wrong = 0
    print(f"{'case':36} {'kernel':20} {'arch':7}", *(f"{name:>10}" for name in COLUMNS))
    with AmdCompiler(arguments.triton) as compiler:
        for case in cases:
            rows = compile_case(case, jax.numpy.bfloat16, compiler, arguments.arch)
            for row in rows:
                cells = (f"{row.get(name, '-'):>10}" for name in COLUMNS)
                print(f"{case!s:36} {row['kernel']:20} {row['arch']:7}", *cells, flush=True)
            for fault in faults(case.op, case.tags, rows):
                print(f"FAULT {case}: {fault}", flush=True)
                wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
