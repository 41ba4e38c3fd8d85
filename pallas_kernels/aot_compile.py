"""Compile Triton IR text to AMD machine code and report its resources.

A program of its own: it needs PyPI triton and no jax, so that triton may live in another
environment, and so that two LLVMs never share a process. Reads one JSON request a line from
standard input ({"path", "arch", "warps", "stages", "assembly"}) and answers one JSON line each.
"""

import json
import os
import re
import sys
from typing import Any

WAVE = 64
SIMDS = 4
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
LOAD = re.compile(r"^\s+(?:global|buffer|flat)_load_(\w+)", re.MULTILINE)
WIDTHS = {
    "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2,
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16,
}  # fmt: skip


def field(assembly: str, name: str) -> int:
    """Value of one integer of the kernel's metadata."""
    found = re.search(rf"\.{name}:\s+(\d+)", assembly)
    return int(found.group(1)) if found else 0


def load_widths(assembly: str) -> dict[int, int]:
    """Bytes a lane reads with one global load -> how many such instructions."""
    counts: dict[int, int] = {}
    for mnemonic in LOAD.findall(assembly):
        kind = mnemonic.removeprefix("lds_").split("_")[0]
        width = WIDTHS.get(kind, 0)
        counts[width] = counts.get(width, 0) + 1
    return counts


def resources(assembly: str, arch: str, warps: int, lds: int) -> dict:
    """The row of the resource table, read from the assembly text; `lds` bytes are dynamic."""
    lds += field(assembly, "group_segment_fixed_size")
    occupancy = re.search(r"Occupancy:\s+(\d+)", assembly)
    waves = int(occupancy.group(1)) if occupancy else 0
    if lds:  # an LDS-bound kernel has fewer programs a compute unit than its registers allow
        waves = min(waves, LDS_BYTES[arch] // lds * warps // SIMDS)
    code = re.search(r"codeLenInByte = (\d+)", assembly)
    loads = load_widths(assembly)
    return {
        "vgprs": field(assembly, "vgpr_count"),
        "agprs": field(assembly, "agpr_count"),
        "spills": field(assembly, "vgpr_spill_count"),
        "scratch": field(assembly, "private_segment_fixed_size"),
        "lds": lds,
        "mfma": len(re.findall(r"^\s+v_(?:s?mfma)", assembly, re.MULTILINE)),
        "fp4": len(re.findall(r"^\s+v_cvt_scalef32_pk_\w+_fp4", assembly, re.MULTILINE)),
        "code": int(code.group(1)) if code else 0,
        "waves": waves,
        "load_bytes": max(loads, default=0),
        "loads": {str(width): count for width, count in sorted(loads.items())},
    }


def simplify(path: str, target: Any, options: dict) -> None:
    """Run the passes over Triton IR that `triton.compile` skips for a file, in place.

    XLA runs them too; without them loops keep what they could hoist, and kernels spill.
    """
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    backend = make_backend(target)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = ir.parse_mlir_module(path, context)
    module.context = context
    module = backend.make_ttir(module, {}, backend.parse_options(dict(options)))
    with open(path, "w") as file:
        file.write(str(module))


def compile_one(request: dict) -> dict:
    """Compile one kernel for one architecture; an answer with "error" when it fails."""
    # What triton 3.9 does unasked and its next version only when told: fused multiply-add.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": request["warps"], "num_stages": request["stages"]}
    target = GPUTarget("hip", request["arch"], WAVE)
    try:
        simplify(request["path"], target, options)
        kernel = triton.compile(request["path"], target=target, options=options)
    except (RuntimeError, ValueError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    assembly = kernel.asm["amdgcn"]
    if request.get("assembly"):
        with open(request["assembly"], "w") as file:
            file.write(assembly)
    return resources(assembly, request["arch"], request["warps"], kernel.metadata.shared)


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(compile_one(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
