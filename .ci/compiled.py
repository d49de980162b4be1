#!/usr/bin/env python3
"""Prints "all" or "sample", the kernels that `.ci/run` must compile.

    .ci/compiled.py          prints "sample" if every current variant has passed, else "all"
    .ci/compiled.py write    records that all passed; only `.ci/run full` calls this, at its end

The record holds the compilers' versions and a digest of every variant's options and of all sources without comments.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from variants import variants

from cuflash.runtime import compiler

RECORD = ROOT / ".ci" / "compiled.json"
ARCHS = ("sm_80", "sm_90")
PINS = re.compile(r"nvidia-cuda-nvrtc==([\d.]+)")  # in .ci/run: the other NVRTC, which compiles every Hopper kernel


def code(path: Path) -> str:
    """Returns the lines of a CUDA source without comments and indentation."""
    lines = (line.partition("//")[0].strip() for line in path.read_text("utf-8").splitlines())
    return "\n".join(line for line in lines if line)


def state() -> dict[str, object]:
    """Returns the current record: the digest of all variants, and the compilers."""
    kernels = [variant for arch in ARCHS for variant in variants(arch)]
    texts = sorted(repr((compiler.options(variant), variant.source)) for variant in kernels)
    digest = hashlib.sha256("".join(texts).encode())
    sources = [path for path in compiler.source_root().rglob("*") if path.suffix in (".cu", ".cuh")]
    for path in sorted(sources):
        digest.update(path.relative_to(compiler.source_root()).as_posix().encode() + b"\0" + code(path).encode())
    newest = ".".join(map(str, compiler.nvrtc_version()))
    compilers = [newest, *PINS.findall((ROOT / ".ci" / "run").read_text("utf-8"))]
    return {"digest": digest.hexdigest(), "kernels": len(kernels), "compilers": compilers}


def main(arguments: list[str]) -> int:
    """Prints "sample" or "all", or writes the record."""
    if arguments == ["write"]:
        RECORD.write_text(json.dumps(state(), indent=1) + "\n", "utf-8")
    elif not arguments:
        recorded = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else None
        print("sample" if recorded == state() else "all")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
