"""Attention over virtual ranks, threads of one process, beside one call: drawn cases."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from virtual_ranks import drawn, run_ranks

COUNTS = {"cpu": 6, "cuda": 20}  # cases of each number of ranks, unless --drawn gives a number


@pytest.mark.slow(60)
@pytest.mark.parametrize("ranks", [4, 8])
def test_drawn_cases_are_those_of_one_call(ranks: int, device: str, request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("drawn") or COUNTS[device]
    assert not drawn(ranks, 0, count, device)


def test_an_error_of_a_rank_ends_the_others() -> None:
    def fails(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank 1 fails")
        torch.distributed.barrier()

    with pytest.raises(ValueError, match="rank 1 fails"):
        run_ranks(3, fails)
    assert run_ranks(3, lambda rank: torch.distributed.get_rank() - rank) == [0, 0, 0]
    assert not torch.distributed.is_initialized()
