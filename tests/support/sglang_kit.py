"""SGLang's conformance kit of dense attention on the CPU, with stand-ins for packages of GPU kernels."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from typing import Any

import plugins
import sglang_stand_ins

sglang_stand_ins.install()

import torch

plugins.load("sglang").register()

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.runner_modes import (
    cuda_graph_decode_runner,
    speculative_draft_extend_runner,
    speculative_target_verify_runner,
    split_op_runner,
)

Case = Callable[[], None]
CPU = {"device": "cpu", "dtype": torch.float32}
# The kit knows the backends' rule for windows by name. Ours: a window of w shows w keys before a query.
dense._SWA_DECODE_EXTEND_WINDOW |= {"cuflash"}


class Skips(unittest.TestCase):
    """A test that fails where the kit skips it: the backend must be there."""

    def skipTest(self, reason: str) -> None:  # noqa: N802
        raise AssertionError(reason)


def case_of(
    name: str, mode: str, lengths: tuple[Any, ...], heads: Any = (4, 4), page: int = 16, window: Any = None
) -> Any:
    """Returns a case of the kit. lengths: of prefixes, and of new tokens except in decode mode."""
    return dense.DenseAttentionCase(
        name, "cuflash", ForwardMode[mode], *heads, page, *lengths, sliding_window_size=window
    )


def kit() -> Iterator[tuple[str, Case]]:
    """Yields all cases of dense attention that the kit has for SGLang's own backends, and their runners."""
    new, test = ((4, 7), (3, 3)), Skips()
    window_cases = [
        *dense.make_swa_no_prefix_input_config_cases("cuflash"),
        *dense.make_swa_prefix_input_config_cases("cuflash"),
    ]
    window_cases += [
        case_of("window_decode", "DECODE", ((15, 16, 17),), (8, 4), window=12),
        case_of("window_extend", "EXTEND", ((8, 16), (8, 16)), (8, 4), window=12),
    ]
    for case in (*dense.make_dense_cases("cuflash"), *window_cases):
        yield case.name, lambda case=case: dense.run_dense_attention_case(test, case, **CPU)
    scattered = [case_of("extend", "EXTEND", ((8, 16), (8, 16)), (12, 12)), window_cases[-1]]
    decode = case_of("decode", "DECODE", ((15, 16, 17),), (12, 12))
    for layout, cases in (("interleaved_pages", [*scattered, decode]), ("non_monotonic_extend", scattered)):
        for case in cases:
            yield (
                f"{layout}_{case.name}",
                lambda case=case, layout=layout: dense.run_dense_attention_case(test, case, loc_layout=layout, **CPU),
            )
    for heads, window in (((4, 4), None), ((4, 2), None), ((4, 4), 12)):
        case = case_of(f"graph_decode_{heads[1]}_{window}", "DECODE", ((14, 15, 16),), heads, window=window)
        yield case.name, lambda case=case: cuda_graph_decode_runner.run_dense_cuda_graph_decode_case(test, case, **CPU)
    for kind in ("eagle", "frozen_kv_mtp", "dflash", "ngram"):
        case = case_of(f"verify_{kind}", "TARGET_VERIFY", new)
        for run in (
            speculative_target_verify_runner.run_dense_spec_verify_case,
            speculative_target_verify_runner.run_dense_spec_verify_cuda_graph_case,
        ):
            yield (
                f"{run.__name__}_{kind}",
                lambda case=case, run=run, kind=kind: run(test, case, topk=1, spec_kind=kind, **CPU),
            )
    for padding in ("small_real", "prod_fill"):
        case = case_of("draft_extend_v2", "DRAFT_EXTEND_V2", new)
        yield (
            f"draft_extend_v2_{padding}",
            lambda case=case, padding=padding: (
                speculative_draft_extend_runner.run_dense_draft_extend_v2_cuda_graph_case(
                    test, case, pad_style=padding, **CPU
                )
            ),
        )
    uneven = case_of("split_op_uneven", "EXTEND", ((0, 8, 16), (15, 8, 1)))
    grouped = case_of("split_op_grouped", "EXTEND", ((15,), (2,)), (4, 2))
    for case, tokens in ((uneven, 32), (grouped, 4)):
        for breakable in (False, True):
            yield (
                f"{case.name}_{breakable}",
                lambda case=case, tokens=tokens, breakable=breakable: split_op_runner.run_dense_split_op_extend_case(
                    test, case, breakable=breakable, static_num_tokens=tokens, **CPU
                ),
            )
