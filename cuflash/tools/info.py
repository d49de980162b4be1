"""Prints versions, GPUs and the kernel cache of this installation. A missing component is named and is no error."""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections import Counter
from importlib import metadata, util
from typing import Any

import numpy as np

from .. import __version__, units
from ..errors import INSTALL_HINT, CompileError, UnsupportedError
from ..planning import device
from ..runtime import compiler
from ..runtime.disk_cache import check_writable, contents


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds no options."""


def main(options: argparse.Namespace) -> int:
    """Prints the text of `text`; returns 0."""
    print(text())
    return 0


def versions() -> dict[str, str]:
    """Returns the versions of cuflash and of the installed packages that it uses."""
    facts = {"cuflash": __version__, "Python": platform.python_version(), "NumPy": np.__version__}
    if (cupy := _distribution("cupy")) is not None:
        facts["CuPy"] = cupy
    with contextlib.suppress(UnsupportedError):
        facts["NVRTC"] = ".".join(map(str, compiler.nvrtc_version()))
    if driver := _driver():
        facts["driver"] = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    for package in ("torch", "jax"):
        if (version := _distribution(package)) is not None:
            facts[package] = version
    return facts


def gpus() -> list[dict[str, Any]]:
    """Returns name, architecture, SMs and shared memory (bytes) of each GPU; "problem" for one that is too old."""
    facts: list[dict[str, Any]] = []
    for ordinal in range(device.count()):
        try:
            gpu = device.query(ordinal)
        except UnsupportedError as error:
            facts.append({"name": f"GPU {ordinal}", "problem": str(error)})
            continue
        names = "name", "arch", "num_sms", "smem_per_block", "smem_per_sm"
        facts.append({name: getattr(gpu, name) for name in names})
    return facts


def machine() -> dict[str, Any]:
    """Returns the versions, GPUs and platform, for the file of a benchmark."""
    return {"versions": versions(), "gpus": gpus(), "platform": f"{platform.system()} {platform.machine()}"}


def line(machine: dict[str, Any]) -> str:
    """Returns the GPUs and versions of a machine in one line."""
    names = Counter(f"{gpu['name']} ({gpu['arch']}, {gpu['num_sms']} SMs)" for gpu in machine["gpus"] if "arch" in gpu)
    gpus = [name if count == 1 else f"{count} x {name}" for name, count in names.items()]
    return f"{'; '.join(gpus) or 'CPU'}: " + ", ".join(f"{name} {x}" for name, x in machine["versions"].items())


def missing() -> list[str]:
    """Returns the reasons why this installation cannot run on a GPU; empty if it can."""
    try:
        compiler.nvrtc_version()
    except UnsupportedError as error:
        return [str(error)]
    if not _driver():
        return ["no NVIDIA driver was found: kernels compile here, but only arrays on the CPU run"]
    if not device.count():
        return [f"CuPy can use no GPU; if there is one, its driver is too old for this CuPy: {INSTALL_HINT}"]
    return []


def cache() -> str:
    """Returns a summary of the kernel cache, with the reason if there is none or no kernel can be added."""
    try:
        folder, sizes = contents()
    except UnsupportedError as error:
        return f"none: {error}"
    summary = f"{folder}: {len(sizes)} kernels, {units.memory(sum(sizes))}"
    try:
        check_writable()
    except UnsupportedError as error:
        return f"{summary}; no more can be kept: {error}" if sizes else f"none: {error}"
    return summary


def text() -> str:
    """Returns versions, GPUs, sources and cache as lines of text."""
    lines = [f"{name:<9} {version}" for name, version in versions().items()]
    for ordinal, gpu in enumerate(gpus()):
        facts = gpu.get("problem") or (
            f"{gpu['name']}, {gpu['arch']}, {gpu['num_sms']} SMs, shared memory {gpu['smem_per_block'] // 1024} KiB a "
            f"block, {gpu['smem_per_sm'] // 1024} KiB an SM"
        )
        lines.append(f"GPU {ordinal:<5} {facts}")
    try:
        lines.append(f"sources   {compiler.source_root()}")
    except CompileError as error:
        lines.append(f"sources   missing: {error}")
    lines.append(f"cache     {cache()}")
    lines += [f"no GPU    {reason}" for reason in missing()]
    return "\n".join(lines)


def _driver() -> int:
    """Returns the CUDA version of the driver, such as 13000; 0 without a driver or CuPy."""
    try:
        from cupy.cuda import runtime

        return int(runtime.driverGetVersion())
    except Exception:  # CuPy raises error types of its own, as in device.count()
        return 0


def _distribution(package: str) -> str | None:
    """Returns the version of an importable package from its metadata: importing torch or jax takes seconds."""
    if util.find_spec(package) is None:
        return None
    for name in (package, f"{package}-cuda13x", f"{package}-cuda12x"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "(unknown version)"
