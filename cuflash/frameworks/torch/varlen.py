"""Variable-length sequences: keywords and refusals that PyTorch's integrations share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from ...errors import ProblemError, UnsupportedError
from ...problem.operands import VARLEN_ARGS, VARLEN_OPS, VarlenArgs
from ...problem.options import check_flag, options_key
from ...runtime.device_integers import check_on_device
from .tensors import check_tensor, is_faking, is_transformed, is_transforming, uncompiled

_MODULE: Any = sys.modules[__name__]  # for `tensors.uncompiled`


def check_integers(name: str, tensor: Any, *, required: bool = False) -> None:
    """Raises unless lengths or indices are int32, or None where they are not required."""
    if tensor is not None or required:
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise ProblemError(f"{name} has dtype {tensor.dtype}; give torch.int32")


def check_values(
    check: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, varlen_args: VarlenArgs, keywords: dict[str, Any]
) -> None:
    """Validates the lengths and indices of a call, if it has any and `check` is True; keywords: its options.

    A graph of torch.compile ends here.
    """
    if not check_flag("check", check) or all(x is None for x in varlen_args):
        return
    if torch.compiler.is_dynamo_compiling():
        # Read as an attribute of the module: `__getattr__` makes it (`tensors.uncompiled`).
        _MODULE.uncompiled_check_values(check, q, k, v, varlen_args, keywords)
        return
    operands = (q, k, v, *varlen_args)
    if _is_traced(operands):
        names = [name for name, x in zip(VARLEN_ARGS, varlen_args, strict=True) if x is not None]
        raise UnsupportedError(
            f"check=True reads {', '.join(names)}, whose values traces and torch.func do not give; call with "
            "check=True outside of them, and leave it out inside"
        )
    with torch.no_grad():
        check_on_device(VARLEN_OPS["forward"], operands, options_key(**keywords), check)


def __getattr__(name: str) -> Any:
    """Makes `uncompiled_check_values`: a graph ends before it."""
    reason = (
        f"check=True reads {', '.join(VARLEN_ARGS)} between graphs; leave fullgraph=False, or call with check=True "
        "outside of torch.compile, and leave it out inside"
    )
    return uncompiled(name, globals(), check_values, reason)


def _is_traced(operands: Iterable[Any]) -> bool:
    """True if a trace or a transform of torch.func is active, or wraps an operand."""
    is_proxied = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    is_tracing = torch.compiler.is_compiling() or torch._C._is_tracing() or is_proxied or is_faking()
    return is_tracing or is_transforming() or any(x is not None and is_transformed(x) for x in operands)


def paged_or_packed(
    cu_seqlens_k: Any, seqused_k: Any, page_table: Any, table: str = "block_table", *, required: bool = True
) -> dict[str, Any]:
    """Returns the keywords of `attention` for keys, packed or in pages.

    Beside a page table, cu_seqlens_k gives lengths alone, and seqused_k takes precedence. table: its name in errors.
    required: lengths must be given, as in flash-attn 2's packed calls.
    """
    check_integers("cu_seqlens_k", cu_seqlens_k, required=required and (page_table is None or seqused_k is None))
    check_integers("seqused_k", seqused_k)
    check_integers(table, page_table)
    if page_table is None:
        return {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k}
    if seqused_k is None and cu_seqlens_k is not None:
        seqused_k = cu_seqlens_k.diff()
    return {"page_table": page_table, "seqused_k": seqused_k}
