"""Contenders of `cuflash bench ranks --measure`: our schemes, PyTorch's context_parallel and ring-flash-attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from ...distributed.choice import choose, ulysses_lacks
from ...distributed.layout import Kind, Layout
from ...distributed.torch import attention
from .measure import reason
from .ranks_problems import Work
from .ranks_timing import Machine

Attention = Callable[[Any, Any, Any], Any]  # out of q, k and v


class Contender(NamedTuple):
    """A way to compute a rank's rows. scheme: of cuflash, else ""; scope: the context in which calls run."""

    name: str
    kind: Kind
    make: Callable[[Work, Layout], Attention]
    scheme: str = ""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


def find(work: Work, machine: Machine, quick: bool | None) -> tuple[list[Contender], dict[str, str]]:
    """Returns the contenders for a problem, and reasons why others are missing."""
    chosen = choose(work.layout(machine.ranks), work.mask, work.heads.q, work.heads.kv)
    layouts: tuple[Kind, ...] = ("zigzag", work.kind) if work.kind != "zigzag" else ("zigzag",)
    some = [("ring", layouts[0]), ("ulysses", layouts[0]), *(("gather", kind) for kind in layouts)]
    if quick:
        some = [(scheme, kind) for scheme, kind in some if scheme != "gather" or work.mask.left is not None
                or work.mean_document is not None]  # fmt: skip
    contenders, missing = [], {}
    for scheme, kind in some:
        if scheme == "ulysses" and (lack := ulysses_lacks(work.heads.q, machine.ranks)):
            missing[f"{scheme}, {work.name}"] = lack
            continue
        contenders.append(Contender(f"cuflash {scheme}, {kind}", kind, partial(_ours, scheme), scheme))
    if chosen not in {contender.scheme for contender in contenders}:
        contenders.append(Contender(f"cuflash {chosen}, {work.kind}", work.kind, partial(_ours, chosen), chosen))
    if work.window is None and work.mean_document is None:
        for add in (_context_parallel, _ring_flash_attention):
            try:
                contenders += add(work, machine)
            except Exception as error:  # errors of these imports depend on their compiler packages
                missing[add.__name__.strip("_")] = reason(error)
    return contenders, missing


def mask_of(work: Work) -> dict[str, Any]:
    """Returns the mask of a problem as arguments of attention."""
    return {"causal": True} if work.window is None else {"window_size": (work.window, 0)}


def _ours(scheme: Any, work: Work, layout: Layout) -> Attention:
    return partial(attention, layout=layout, scheme=scheme, **mask_of(work))


def _sdpa(work: Work, layout: Layout) -> Attention:
    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = work.heads.q != work.heads.kv
        sdpa = torch.nn.functional.scaled_dot_product_attention  # read here: context_parallel replaces it
        return sdpa(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    return call


def _context_parallel(work: Work, machine: Machine) -> list[Contender]:
    """Returns PyTorch's ring, whose load balancer has the rows of "zigzag"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(machine.device.type, (machine.ranks,))

    @contextmanager
    def scope(backend: Any) -> Iterator[None]:
        some = torch.zeros(work.rows * machine.ranks, device=machine.device)  # it needs a buffer, and shards it
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(backend))
            stack.enter_context(context_parallel(mesh, buffers=[some], buffer_seq_dims=[0], no_restore_buffers={some}))
            yield

    return [
        Contender(f"torch context_parallel, {name}", "zigzag", _sdpa, scope=partial(scope, backend))
        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION))
    ]


def _ring_flash_attention(work: Work, machine: Machine) -> list[Contender]:
    from ring_flash_attn import zigzag_ring_flash_attn_func

    def make(work: Work, layout: Layout) -> Attention:
        return partial(zigzag_ring_flash_attn_func, causal=True)

    return [Contender("ring-flash-attention", "zigzag", make)]
