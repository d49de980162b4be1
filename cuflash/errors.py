"""The errors of a call. Each message says what was given, what is accepted and what to do."""


class ProblemError(ValueError):
    """Arguments that describe no attention problem: wrong shapes, dtypes, devices, scale or mask."""


class UnsupportedError(NotImplementedError):
    """A valid problem that this build or this machine cannot run."""


class CompileError(RuntimeError):
    """A kernel that NVRTC refused. The message has the compiler's log, the variant's name and the source's path."""


class ExchangeError(RuntimeError):
    """A rank of `cuflash.distributed` that got no answer from the others: one has ended, or made another call."""


REFUSALS = ProblemError, UnsupportedError


# The packages are listed because the extras cuflash[cuda12] and cuflash[cuda13], which install the same, need the path
# or URL from which cuflash was installed.
INSTALL_HINT = (
    'pip install "cupy-cuda13x>=14.0" "nvidia-cuda-nvrtc>=13.0,<14" "nvidia-cuda-runtime>=13.0,<14" "ml_dtypes>=0.5"; '
    'with a driver older than 580: pip install "cupy-cuda12x>=14.0" "nvidia-cuda-nvrtc-cu12>=12.8,<13" '
    '"nvidia-cuda-runtime-cu12>=12.8,<13" "ml_dtypes>=0.5"'
)
