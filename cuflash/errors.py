"""The three ways a call can fail. Each message says what was given, what is accepted and what to do."""


class ProblemError(ValueError):
    """The arguments do not describe an attention problem: shapes, dtypes, devices, scale or mask are wrong."""


class UnsupportedError(NotImplementedError):
    """The problem is legal, but this build or this machine has nothing to run it with."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel. The message holds the compiler's log, the variant's name and where the source is."""


REFUSALS = ProblemError, UnsupportedError


# why not the extras of cuflash, which install the same: they go with the path or the URL that cuflash came from.
INSTALL_HINT = (
    'pip install "cupy-cuda13x>=14.0" "nvidia-cuda-nvrtc>=13.0,<14" "nvidia-cuda-runtime>=13.0,<14" "ml_dtypes>=0.5"; '
    'with a driver older than 580: pip install "cupy-cuda12x>=14.0" "nvidia-cuda-nvrtc-cu12>=12.8,<13" '
    '"nvidia-cuda-runtime-cu12>=12.8,<13" "ml_dtypes>=0.5"'
)
