"""Keys put together from two sources, and their gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cuflash.distributed.assembly import Assembly, Run

CPU = torch.device("cpu")
# Rows 0 … 3 of the sequence are received as rows 2 … 5, rows 4 … 6 are local, and rows 7 and 8 received as 0 and 1.
HELD = [((0, 4), Run(0, 2, 4)), ((4, 7), Run(1, 0, 3)), ((7, 9), Run(0, 0, 2))]


@pytest.mark.parametrize(
    ("ranges", "rows", "runs"),
    [
        ([(0, 9)], range(9), 3),
        ([(4, 9), (0, 4)], [4, 5, 6, 7, 8, 0, 1, 2, 3], 2),  # received rows 0 … 5 follow each other
        ([(1, 5), (3, 9)], [1, 2, 3, 4, 3, 4, 5, 6, 7, 8], 5),
        ([(5, 5), (6, 7)], [6], 1),
        ([], [], 0),
    ],
    ids=str,
)
def test_rows_and_sums(ranges: list[tuple[int, int]], rows: list[int], runs: int) -> None:
    assembly = Assembly.of_ranges(ranges, HELD, (6, 3), CPU)
    sequence = torch.randn(9, 2, dtype=torch.float64)
    keys = assembly.take(torch.cat([sequence[7:], sequence[:4]]), sequence[4:7])
    assert torch.equal(keys, sequence[list(rows)])
    assert len(assembly.runs) == runs
    assert (assembly.inverse is not None) == (sorted(rows) == [*range(9)])
    dkeys = torch.randn_like(keys)
    received, local = assembly.sum(dkeys)
    expected = torch.zeros(9, 2, dtype=torch.float64).index_add_(0, torch.tensor([*rows], dtype=torch.int64), dkeys)
    assert torch.allclose(torch.cat([received[2:], local, received[:2]]), expected, rtol=1e-14)


def test_sums_of_16_bits_are_float32() -> None:
    assembly = Assembly.of_ranges([(0, 1)] * 300, [((0, 1), Run(1, 0, 1))], (0, 1), CPU)
    _, local = assembly.sum(torch.ones(300, 1, dtype=torch.bfloat16))
    assert (local.dtype, local.tolist()) == (torch.float32, [[300.0]])  # 256 where each addition is rounded
