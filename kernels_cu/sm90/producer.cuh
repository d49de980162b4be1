// The producer: one thread deals out tiles and fills q and the ring of k and v by TMA.
#pragma once
#include "../common/mask.cuh"
#include "storage.cuh"

// The tiles of this block: the first by its index, the others as they are handed out, or in turn. Within
// heads_together heads the last query blocks of all come first, the longest under a causal mask; so few heads that
// their keys and values stay in L2.
struct Schedule {
  unsigned index = blockIdx.x;

  __device__ __forceinline__ void advance(const TiledParams& params) {
    if (params.counter == nullptr) {
      index += gridDim.x;
    } else {
      unsigned taken = 0;
      if (threadIdx.x == 0) {
        taken = atomicAdd(params.counter, 1u);
        // why: every tile beyond the first of a block, and every block's last question, counts once.
        if (taken == params.num_tiles - 1) atomicExch(params.counter, 0u);
      }
      taken = __shfl_sync(0xffffffffu, taken, 0);
      index = gridDim.x + taken;
    }
  }

  __device__ __forceinline__ Tile tile(const TiledParams& params) const {
    if (index >= params.num_tiles) return {kNoTile};
    const unsigned num_blocks = params.forward.num_q_blocks, of_together = params.heads_together * num_blocks;
    const unsigned together = index / of_together, within = index - together * of_together;
    const unsigned first_head = together * params.heads_together;
    const unsigned num_heads = min(unsigned(params.heads_together), params.num_tiles / num_blocks - first_head);
    const unsigned from_last = within / num_heads;
    Tile tile;
    tile.row_begin = (num_blocks - 1 - from_last) * kBlockQ;
    const int head = first_head + within - from_last * num_heads;
    tile.batch = head / params.forward.heads_q, tile.head = head - tile.batch * params.forward.heads_q;
    tile.kv_head = tile.head / params.forward.heads_per_kv;
    const KeyRange keys =
        Mask(params.forward).key_range(tile.row_begin, min(tile.row_begin + kBlockQ, params.forward.seqlen_q));
    tile.begin = keys.begin / kBlockK;
    tile.end = max((keys.end + kBlockK - 1) / kBlockK, tile.begin + 1);
    return tile;
  }
};

template <int kPanels>
__device__ __forceinline__ void load_panels(const TensorMap& map, unsigned target, unsigned panel_bytes,
                                            unsigned barrier, int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_load_4d(target + panel * panel_bytes, &map, barrier, panel * kPanelColumns, row, head, batch);
  }
}

// One warp, all lanes in step; the first one acts. why: what all lanes have alike needs no registers of theirs.
struct Producer {
  const TiledParams& params;
  const Addresses& smem;
  RingPosition ring;

  __device__ Producer(const TiledParams& p, const Addresses& s) : params(p), smem(s) {}

  // Key tile n of k or v into the ring.
  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, int n, int kv_head, int batch) {
    const unsigned barrier = smem.kv_full + 8 * ring.slot, target = smem.kv + ring.slot * kBytesSlot;
    const int row = n * kBlockK - params.forward.key_begin;
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytesK);
      load_panels<kPanels>(map, target, kPanelBytesK, barrier, row, kv_head, batch);
    }
    __syncwarp();
    ring.advance();
  }

  // Tells the consumers about tile i.
  __device__ __forceinline__ void describe(unsigned i, const Tile& tile) {
    const unsigned slot = i % kTileSlots;
    if (threadIdx.x == 0) {
      st_shared_v4(smem.tiles + 32 * slot, {unsigned(tile.row_begin), unsigned(tile.begin), unsigned(tile.end), 0});
      st_shared_v4(smem.tiles + 32 * slot + 16, {unsigned(tile.head), unsigned(tile.batch), 0, 0});
      mbarrier_arrive(smem.tile_full + 8 * slot);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_q(unsigned i, const Tile& tile) {
    const unsigned slot = i % kQStages, barrier = smem.q_full + 8 * slot;
    mbarrier_wait(smem.q_empty + 8 * slot, (i / kQStages + 1) & 1);
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect_tx(barrier, kBytesQ);
      load_panels<kPanelsQk>(params.q, smem.q + slot * kBytesQ, kPanelBytesQ, barrier, tile.row_begin, tile.head,
                             tile.batch);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int n) {
    load<kPanelsQk>(params.k, n, tile.kv_head, tile.batch);
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int n) {
    if constexpr (kPanelsV > 0) load<kPanelsV>(params.v, n, tile.kv_head, tile.batch);
  }

  __device__ __forceinline__ void run() {
    Schedule schedule;
    Tile last = {kNoTile};
#pragma unroll 1
    for (unsigned i = 0;; ++i, schedule.advance(params)) {
      const Tile tile = schedule.tile(params);
      describe(i, tile);
      if (tile.row_begin != kNoTile) {
        load_q(i, tile);
        load_k(tile, tile.end - 1);
      }
      if (kNextScoresFirst && i > 0) load_v(last, last.begin);
      if (tile.row_begin == kNoTile) break;
#pragma unroll 1
      for (int n = tile.end - 2; n >= tile.begin; --n) {
        load_k(tile, n);
        load_v(tile, n + 1);
      }
      if (!kNextScoresFirst) load_v(tile, tile.begin);
      last = tile;
    }
  }
};
