"""The three ways a call can fail. Each message says what was given, what is accepted and what to do."""


class ProblemError(ValueError):
    """The arguments do not describe an attention problem: shapes, dtypes, devices, scale or mask are wrong."""


class UnsupportedError(NotImplementedError):
    """The problem is legal, but this build or this machine has nothing to run it with."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel. The message holds the compiler's log, the variant's name and where the source is."""


INSTALL_HINT = 'pip install "cuflash[cuda13]" (driver 580 or later) or "cuflash[cuda12]"'
