"""Functions of a part of a sequence find the lengths of the whole one, and so its positions."""

from __future__ import annotations

from typing import Any

import pytest

from cuflash import mods

torch = pytest.importorskip("torch")
from cuflash.distributed.lengths import with_length
from cuflash.frameworks.torch import attention

ROWS = 100


def test_masks_and_scores_of_cuflash_are_those_of_the_whole() -> None:
    q, k, v = torch.randn(3, 1, ROWS, 2, 16, generator=torch.Generator().manual_seed(0))
    slopes = torch.tensor([0.1, 0.5], requires_grad=True)
    documents = torch.tensor([0, 20, 50, ROWS])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, k_idx: Any) -> Any:
        return score - slopes[h] * abs(mods.position_of(q_idx) - k_idx) + 0.01 * mods.seqlen_q()

    functions = {"score_mod": score_mod, "mask_mod": mods.document(documents)}
    whole = attention(q, k, v, **functions)[:, 13:77]
    of_part = with_length(functions, torch.tensor(ROWS, dtype=torch.int32))
    part = attention(q[:, 13:77], k, v, index_offsets=(13, 0), **of_part)
    torch.testing.assert_close(part, whole)
    (grad,), (expected,) = (torch.autograd.grad(x.sum(), slopes) for x in (part, whole))
    torch.testing.assert_close(grad, expected)


def test_functions_without_lengths_are_unchanged() -> None:
    functions = {"mask_mod": lambda b, h, i, j: i >= j, "sinks": torch.zeros(2)}
    assert with_length(functions, torch.tensor(ROWS, dtype=torch.int32)) == functions
