"""Facts about a GPU: the only hardware query of the library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ..errors import INSTALL_HINT, ProblemError, UnsupportedError
from ..locks import Once


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that plans depend on. Shared memory is in bytes, `smem_per_block` the opt-in limit."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    smem_per_block: int
    smem_per_sm: int

    @Once
    def arch(self) -> str:
        """The name of its architecture, such as `sm_90`."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


KIB = 1024
# Source: CUDA C++ Programming Guide, "Compute Capabilities" (shared memory per block and per SM); SM counts are those
# of the largest common board of each architecture and only serve plans made without a GPU.
DEVICES = {
    device.arch: device
    for device in (
        Device("A100", (8, 0), 108, 163 * KIB, 164 * KIB),
        Device("A10", (8, 6), 72, 99 * KIB, 100 * KIB),
        Device("L40", (8, 9), 142, 99 * KIB, 100 * KIB),
        Device("H100", (9, 0), 132, 227 * KIB, 228 * KIB),
        Device("B200", (10, 0), 148, 227 * KIB, 228 * KIB),
        Device("RTX PRO 6000", (12, 0), 188, 99 * KIB, 100 * KIB),
    )
}


def named(arch: str) -> Device:
    """The device of a name such as "sm_90": for planning and compiling without a GPU."""
    try:
        return DEVICES[arch]
    except (KeyError, TypeError):
        names = ", ".join(DEVICES)
        raise ProblemError(f"device={arch!r} is not known; give a GPU such as cuda:0, or one of {names}") from None


def of_name(name: str) -> Device:
    """The device called "cuda:0", which is queried, or "sm_90", which needs no GPU."""
    if isinstance(name, str) and name.startswith("cuda:") and name.removeprefix("cuda:").isdecimal():
        return query(int(name.removeprefix("cuda:")))
    return named(name)


@cache
def query(ordinal: int) -> Device:
    """The facts of the installed GPU with this ordinal."""
    try:
        from cupy.cuda import runtime

        facts = runtime.getDeviceProperties(ordinal)
    except ImportError as error:
        raise UnsupportedError(f"GPU {ordinal} needs CuPy, which is not installed: {INSTALL_HINT}") from error
    except Exception as error:  # why: CuPy raises its own error types for a missing driver or GPU
        raise UnsupportedError(f"GPU {ordinal} cannot be used ({error}); see python -m cuflash info") from error
    device = Device(
        name=facts["name"].decode(),
        capability=(facts["major"], facts["minor"]),
        num_sms=facts["multiProcessorCount"],
        smem_per_block=facts["sharedMemPerBlockOptin"],
        smem_per_sm=facts["sharedMemPerMultiprocessor"],
    )
    if device.capability < (8, 0):
        raise UnsupportedError(
            f"GPU {ordinal} ({device.name}) is {device.arch}; the kernels need sm_80 or newer. "
            "Pass NumPy arrays to run on the CPU."
        )
    return device


def count() -> int:
    """Returns how many CUDA GPUs this process can use; 0 without CuPy, driver or GPU."""
    try:
        from cupy.cuda import runtime

        return int(runtime.getDeviceCount())
    except Exception:  # why: CuPy raises its own error types for a missing driver, and ImportError when absent
        return 0
