"""Shapes of the wgmma kernels' tiles (sm_90): shared memory, threads and macros of a thread block.

`tiles_sm90.py` has the tables of all tiles, and chooses from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from .device import DEVICES
from .tile import FLOAT_BYTES, ROW_PADDING, macros, rounded_up

PANEL_BYTES = 128  # a row of a panel in shared memory
PANEL_COLUMNS = PANEL_BYTES // 2  # 16-bit columns of a panel
WORK_SLOTS = 16  # descriptions of work tiles in shared memory
# With varlen: bytes of descriptions of work tiles in backward, and in backward_dq_dkv.
WORK_RING_BYTES, WORK_BYTES = 4 * (96 + 16), 2 * (96 + 16 + 8)
GROUP_ROWS = 64  # queries of a warpgroup
OUT_ROWS = 16  # rows of out, or of a gradient, that a warp stores at a time
WARP_ROWS = 16  # queries of a warp
FEW_SEQUENCES = 32  # one for each lane of a warp
# Shared memory of a block at most, and of an SM, where each resident block takes 1 KiB more.
SMEM_PER_BLOCK, SMEM_PER_SM = DEVICES["sm_90"].smem_per_block, DEVICES["sm_90"].smem_per_sm
GRADIENTS = ("dq", "dk", "dv")  # in the order of their numbers in the kernels


@dataclass(frozen=True, slots=True)
class WarpgroupTile:
    """Compile-time shape of one thread block: a warpgroup that copies, and one for every 64 queries.

    `head_dim_v` is 0 without v. `stages` counts the tiles of k and v in one ring, `q_stages` the tiles of q. The first
    `q_columns` columns of q stay in registers (less energy, L20). A warp stores `out_panels` panels of its rows of out
    at a time.
    """

    head_dim: int
    head_dim_v: int
    block_q: int
    block_k: int
    stages: int
    q_stages: int
    q_columns: int
    out_panels: int
    ping_pong: bool = False  # warpgroups alternate at the tensor cores (out of phase, L27)
    max_keys: int | None = None  # the row is for a mask under which queries see at most so many keys on average
    softcap: bool | None = None  # True: only for softcapped scores; False: only for others; None: both (registers, L10)
    dropout: bool | None = None  # likewise for dropout
    is_varlen: bool = False  # True for variable-length sequences
    decodes: bool = False  # True for sm90/decode/, where rows of a block are queries of all heads of a group
    paged: bool = False  # True if keys lie in pages (short cold code, L50)
    few: bool = False  # True for decoding at most FEW_SEQUENCES sequences, none packed (short cold code, L50)
    single: bool = False  # True if each thread block decodes at most one work tile

    @property
    def warps(self) -> int:
        """The warps of one block."""
        return 4 * (self._groups + 1)

    @property
    def _groups(self) -> int:
        return max(self.block_q // GROUP_ROWS, 1)

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, with the longest descriptions of work tiles."""
        q_panels, v_panels = (-(-dim // PANEL_COLUMNS) for dim in (self.head_dim, self.head_dim_v))
        tiles = self.q_stages * q_panels * self.block_q + self.stages * max(q_panels, v_panels) * self.block_k
        if self.block_q == WARP_ROWS and not self.single:  # each warp has partial rows of its keys
            out = 4 * WARP_ROWS * FLOAT_BYTES * (self.head_dim_v + ROW_PADDING + 2)
        else:
            out = max(4 * self._groups * 16, self.out_panels * self.block_q * PANEL_BYTES)
        barriers = 8 * (WORK_SLOTS + 2 * self.q_stages * self._groups + 2 * self.stages)
        work = (96 if self.decodes else 80 if self.is_varlen else 32) * WORK_SLOTS
        work += 16 * self.stages + (16 if self.decodes else 32) if self.is_varlen else 0
        # With mask tiles: indices of the ring's key tiles, and barriers of the warp that counts mask tiles.
        work += 0 if self.decodes else rounded_up(8 * self.stages, 16) + 16
        return rounded_up(tiles * PANEL_BYTES + out + rounded_up(barriers, 16) + work, 1024)

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        fields = "head_dim head_dim_v block_q block_k stages q_stages q_columns out_panels ping_pong"
        return macros(self, fields, "decodes paged few single")

    def for_varlen(self, paged: bool) -> WarpgroupTile:
        """Returns the tile for variable-length sequences, with the same key tiles."""
        # Fewer columns: the warps that schedule work tiles and copy pages take registers from the others.
        columns = min(self.q_columns, 32 if paged else 16) if self.head_dim > 192 else self.q_columns
        return replace(self, q_columns=columns, is_varlen=True, paged=paged)


@cache  # because it takes two thirds of the time to plan a new length
def decoding_tile(
    tile: WarpgroupTile, paged: bool, few: bool, narrow: bool = False, single: bool = False
) -> WarpgroupTile:
    """Returns the tile of `sm90/decode/decode.cu` with the same key tiles, and the longest ring that fits a block.

    narrow: True for `sm90/decode/narrow.cu`, which has the rows of one warp. single: True if each thread block has
    at most one work tile.
    """
    # q stays in shared memory: NVRTC 13.0 loses q's registers (L51).
    tile = replace(tile, block_q=GROUP_ROWS, q_stages=1, q_columns=0, out_panels=0, ping_pong=False,
                   max_keys=None, dropout=None, is_varlen=True, decodes=True, paged=paged, few=few)  # fmt: skip
    if narrow:
        tile = replace(tile, block_q=WARP_ROWS, block_k=128 if tile.head_dim <= 128 else 64, q_stages=2)
    room = SMEM_PER_BLOCK
    if single:
        tile = replace(tile, q_stages=1, single=True)
        # Half of an SM, so that thread blocks of two consecutive calls run together.
        room = SMEM_PER_SM // 2 - 1024 if tile.head_dim_v <= 128 else room
    most = 2 * (WORK_SLOTS - 5)  # one work slot for every two stages of the ring, and five more
    fitting = (replace(tile, stages=stages) for stages in range(most, 0, -1))
    return next(each for each in fitting if each.smem_bytes(2) <= room)


@dataclass(frozen=True, slots=True)
class WarpgroupBackwardTile:
    """Compile-time shape of one block of backward: a warpgroup that copies, and two that share `block_k` keys.

    One block takes `key_blocks` key blocks of a short head in turn, half as many under a mask (full waves, L35). The
    first `k_steps` and `v_steps` steps of 16 columns of k and v stay in registers (less energy, L20).
    """

    head_dim: int
    head_dim_v: int
    block_q: int
    key_blocks: int = 1
    k_steps: int = 0
    v_steps: int = 0
    varlen_k_steps: int | None = None  # k_steps for variable-length sequences, if it differs
    softcap: bool | None = None  # as in `WarpgroupTile`
    min_queries: int = 0  # the row is for keys that at least so many queries see on average
    shares_heads: bool = False  # True if thread blocks share the query heads of each key block (full waves, L35)
    block_k: int = 128
    stages: int = 2  # tiles of q and of dout in shared memory
    ds_stages: int = 2
    warps: int = 12

    def for_varlen(self) -> WarpgroupBackwardTile:
        """Returns the tile for variable-length sequences, whose kernels hold more in registers (L5)."""
        return self if self.varlen_k_steps is None else replace(self, k_steps=self.varlen_k_steps)

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        q_panels, v_panels = (-(-dim // PANEL_COLUMNS) for dim in (self.head_dim, self.head_dim_v))
        rows = (q_panels + v_panels) * (self.block_k + self.stages * self.block_q)  # k, v, q, dout
        rows += self.ds_stages * self.block_k // PANEL_COLUMNS * self.block_q
        dq = FLOAT_BYTES * self.acc_floats
        sums = 2 * 8 if self.block_q % GROUP_ROWS else dq  # transposed dq shares its buffer with the sums
        stats = self.stages * 2 * self.block_q * FLOAT_BYTES
        barriers, modes = 8 * (4 * self.stages + 9), 6 * 4
        return rounded_up(rows * PANEL_BYTES + dq + sums + stats + barriers + modes + WORK_RING_BYTES, 1024)

    @property
    def tma_rows(self) -> tuple[int, int]:
        """The rows of q and dout, and of k and v, in one TMA copy."""
        return self.block_q, self.block_k

    @property
    def dq_rows(self) -> int:
        """The rows of dq in one TMA copy: warpgroups share a transposed tile of three panels by queries."""
        is_by_queries = self.block_q % GROUP_ROWS and self.head_dim > 2 * PANEL_COLUMNS
        return math.gcd(self.block_q // 2, OUT_ROWS) if is_by_queries else OUT_ROWS

    @property
    def acc_floats(self) -> int:
        """The floats of the accumulator of a dq tile in global memory."""
        by_rows = self.block_q == 2 * GROUP_ROWS  # warpgroups share a tile by rows, or by panels of columns
        return self.block_q * (self.head_dim if by_rows else rounded_up(self.head_dim, PANEL_COLUMNS))

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        return macros(self, "head_dim head_dim_v block_q block_k stages ds_stages k_steps v_steps", "shares_heads")


@dataclass(frozen=True, slots=True)
class ClusterBackwardTile:
    """Compile-time shape of backward in clusters: two thread blocks share 128 keys, with tiles of 64 queries.

    Of a thread block's four warpgroups, one copies; the others compute p and dv, ds and dk, and half of dq's columns.
    """

    head_dim: int
    head_dim_v: int
    v_steps: int = 4  # steps of 16 columns of v in registers, whose shared memory then passes p between warpgroups
    softcap: bool | None = None  # as in `WarpgroupTile`
    num_in_cluster: int = 2
    block_q: int = GROUP_ROWS
    block_k: int = 2 * GROUP_ROWS
    stages: int = 2  # tiles of q and of dout in shared memory
    warps: int = 16

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        panels = (1 + self.stages) * (self.head_dim + self.head_dim_v) // PANEL_COLUMNS  # k and v, q and dout
        panels += self.head_dim // 2 // PANEL_COLUMNS + 2  # the other thread block's k, and ds
        stats, barriers = self.stages * 2 * self.block_q * FLOAT_BYTES, 8 * (4 * self.stages + 2)
        return rounded_up(panels * GROUP_ROWS * PANEL_BYTES + stats + barriers, 1024)

    @property
    def tma_rows(self) -> tuple[int, int]:
        """The rows of q and dout, and of k and v, in one TMA copy."""
        return self.block_q, GROUP_ROWS

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        return macros(self, "head_dim head_dim_v block_q block_k stages v_steps")


@dataclass(frozen=True, slots=True)
class WarpgroupDqDkvTile:
    """Compile-time shape of one block of a kernel for one gradient: two warpgroups share 128 rows.

    Rows are queries for dq, and keys for dk and dv. A tile has `columns` keys for dq, or queries for dk and dv.
    `stages` counts the tiles of k or q, `second_stages` the tiles of v or dout.
    """

    gradient: str  # "dq", "dk" or "dv"
    head_dim: int
    head_dim_v: int
    columns: int
    stages: int
    second_stages: int
    softcap: bool | None = None  # as in `WarpgroupTile`
    shares_heads: bool = False  # True if two thread blocks share the query heads of a key block (full waves, L35)
    warps: int = 12

    @property
    def block_q(self) -> int:
        """The queries of a block for dq, or of a tile for dk and dv."""
        return 2 * GROUP_ROWS if self.gradient == "dq" else self.columns

    @property
    def block_k(self) -> int:
        """The keys of a tile for dq, or of a block for dk and dv."""
        return self.columns if self.gradient == "dq" else 2 * GROUP_ROWS

    @property
    def tma_rows(self) -> tuple[int, int]:
        """The rows of q and dout, and of k and v, in one TMA copy."""
        return self.columns, self.columns

    def smem_bytes(self, itemsize: int) -> int:
        """Returns the shared memory of one block in bytes, as `SharedStorage` in the kernel asserts."""
        qk_panels, v_panels = (-(-dim // PANEL_COLUMNS) for dim in (self.head_dim, self.head_dim_v))
        rows = qk_panels * (2 * GROUP_ROWS + self.stages * self.columns) + v_panels * self.second_stages * self.columns
        rows += v_panels * 2 * GROUP_ROWS if self.gradient != "dv" else 0
        nothing = 16 if self.gradient == "dv" else 0
        # Floats of lse and delta: for dq, of the block's queries; for dk, of four tiles. For dv, of lse of eight tiles.
        queries = 2 * 2 * GROUP_ROWS if self.gradient == "dq" else 8 * self.columns
        barriers = 16 * (self.stages + self.second_stages)
        return rounded_up(rows * PANEL_BYTES + nothing + queries * FLOAT_BYTES + barriers + WORK_BYTES, 1024)

    @property
    def constants(self) -> dict[str, int]:
        """The tile's macros for `config.cuh`."""
        shape = macros(self, "head_dim head_dim_v block_q block_k stages second_stages", "shares_heads")
        return {"GRADIENT": GRADIENTS.index(self.gradient)} | shape
