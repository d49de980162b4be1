"""Variable-length sequences: keywords and refusals that several integrations of PyTorch share."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ProblemError
from .tensors import check_tensor


def check_integers(name: str, tensor: Any, *, required: bool = False) -> None:
    """Raises unless lengths or places are int32, or None where they are not required."""
    if tensor is not None or required:
        check_tensor(name, tensor)
        if tensor.dtype != torch.int32:
            raise ProblemError(f"{name} has dtype {tensor.dtype}; give torch.int32")


def paged_or_packed(
    cu_seqlens_k: Any, seqused_k: Any, page_table: Any, table: str = "block_table", *, required: bool = True
) -> dict[str, Any]:
    """Returns the keywords of `attention` for keys, packed or in pages.

    Beside a table of pages, cu_seqlens_k gives lengths alone, and seqused_k comes first. table: its name in errors.
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
