"""Properties of GPUs: the only hardware query of the library."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from ..errors import INSTALL_HINT, ProblemError, UnsupportedError
from ..locks import Once


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that plans depend on. Shared memory is in bytes; `smem_per_block` is the opt-in limit."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    smem_per_block: int
    smem_per_sm: int

    @Once
    def arch(self) -> str:
        """The name of the architecture, such as `sm_90`."""
        return _arch(self.capability)


def _arch(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


KIB = 1024
OLDEST = (8, 0)
# Source: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory per block and per SM). SM counts are from
# the largest common board of each architecture and only serve plans made without a GPU.
DEVICES = {
    device.arch: device
    for device in (
        Device("A100", (8, 0), 108, 163 * KIB, 164 * KIB),
        Device("A10", (8, 6), 72, 99 * KIB, 100 * KIB),
        Device("Jetson AGX Orin", (8, 7), 16, 163 * KIB, 164 * KIB),
        Device("L40", (8, 9), 142, 99 * KIB, 100 * KIB),
        Device("H100", (9, 0), 132, 227 * KIB, 228 * KIB),
        Device("B200", (10, 0), 148, 227 * KIB, 228 * KIB),
        Device("B300", (10, 3), 148, 227 * KIB, 228 * KIB),
        Device("Jetson AGX Thor", (11, 0), 20, 227 * KIB, 228 * KIB),
        Device("RTX PRO 6000", (12, 0), 188, 99 * KIB, 100 * KIB),
        Device("DGX Spark", (12, 1), 48, 99 * KIB, 100 * KIB),
    )
}
# Architectures of Tegra (Orin and Thor) and the code that each can run. sm_101 of CUDA 12 is sm_110 in CUDA 13.
TEGRAS = {87: (87,), 101: (101, 110), 110: (110, 101)}


def code_runs(code: int, arch: int) -> bool:
    """Returns True if machine code for sm_`code` runs on a GPU of sm_`arch`."""
    if code in TEGRAS or arch in TEGRAS:
        return code in TEGRAS.get(arch, ())
    return code // 10 == arch // 10 and code <= arch


def named(arch: str) -> Device:
    """Returns the device of a name such as "sm_90", for planning and compiling without a GPU."""
    try:
        return DEVICES[arch]
    except (KeyError, TypeError):
        names, match = ", ".join(DEVICES), isinstance(arch, str) and re.fullmatch(r"sm_(\d+)(\d)", arch)
        is_old = match and (int(match[1]), int(match[2])) < OLDEST
        reason = f"is too old: the kernels need {_arch(OLDEST)} or newer" if is_old else "is not known"
        raise ProblemError(f"device={arch!r} {reason}; give a GPU such as cuda:0, or one of {names}") from None


def of_name(name: str) -> Device:
    """Returns the device called "cuda:0", by a query, or "sm_90", which needs no GPU."""
    if isinstance(name, str) and name.startswith("cuda:") and name.removeprefix("cuda:").isdecimal():
        return query(int(name.removeprefix("cuda:")))
    return named(name)


@cache
def query(ordinal: int) -> Device:
    """Returns the properties of the installed GPU with this ordinal."""
    try:
        from cupy.cuda import runtime

        facts = runtime.getDeviceProperties(ordinal)
    except ImportError as error:
        raise UnsupportedError(f"GPU {ordinal} needs CuPy, which is not installed: {INSTALL_HINT}") from error
    except Exception as error:  # CuPy raises its own error types for a missing driver or GPU
        raise UnsupportedError(f"GPU {ordinal} cannot be used ({error}); see python -m cuflash info") from error
    device = Device(
        name=facts["name"].decode(),
        capability=(facts["major"], facts["minor"]),
        num_sms=facts["multiProcessorCount"],
        smem_per_block=facts["sharedMemPerBlockOptin"],
        smem_per_sm=facts["sharedMemPerMultiprocessor"],
    )
    if device.capability < OLDEST:
        raise UnsupportedError(
            f"GPU {ordinal} ({device.name}) is {device.arch}; the kernels need {_arch(OLDEST)} or newer. "
            "Pass NumPy arrays to run on the CPU."
        )
    return device


def count() -> int:
    """Returns the number of CUDA GPUs that this process can use; 0 without CuPy, driver or GPU."""
    try:
        from cupy.cuda import runtime

        return int(runtime.getDeviceCount())
    except Exception:  # CuPy raises its own error types for a missing driver, and its import may fail
        return 0
