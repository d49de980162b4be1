// The producers, which copy by TMA: one warp deals out tiles and fills the ring of k and v, others q.
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
  const bool acts = threadIdx.x % 32 == 0;

  __device__ Producer(const TiledParams& p, const Addresses& s) : params(p), smem(s) {}
};

// Warp 0 deals out tiles and fills the ring.
struct KeyProducer : Producer {
  RingPosition ring;

  using Producer::Producer;

  // Key tile n of k or v into the ring.
  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, int n, int kv_head, int batch) {
    const unsigned barrier = smem.kv_full + 8 * ring.slot, target = smem.kv + ring.slot * kBytesSlot;
    const int row = n * kBlockK - params.forward.key_begin;
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (acts) {
      mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytesK);
      load_panels<kPanels>(map, target, kPanelBytesK, barrier, row, kv_head, batch);
    }
    __syncwarp();
    ring.advance();
  }

  __device__ __forceinline__ void describe(unsigned i, const Tile& tile) const {
    if (acts) smem.describe(i, tile);
    __syncwarp();
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int n) {
    load<kPanelsQk>(params.k, n, tile.kv_head, tile.batch);
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int n) {
    if constexpr (kPanelsV > 0) load<kPanelsV>(params.v, n, tile.kv_head, tile.batch);
  }

  // The last p v of a query block is made in the one after it.
  __device__ __forceinline__ void load_last_v(unsigned i) {
    const Tile tile = smem.tile(i);
    load_v(tile, tile.begin);
  }

  // why: tiles are read back from shared memory: registers are few.
  __device__ __forceinline__ void run(const Tile& first) {
    Schedule schedule;
    describe(0, first);
    unsigned i = 0;
#pragma unroll 1
    for (;; ++i) {
      const Tile tile = smem.tile(i);
      if (tile.row_begin == kNoTile) break;
      // why: q of the next block should not come when all blocks begin with new keys, and tiles that are handed out are
      // taken late.
      const int claim_at = params.counter == nullptr ? max(tile.begin, tile.end - 4) : tile.begin;
#pragma unroll 1
      for (int n = tile.end - 1; n >= tile.begin; --n) {
        if (n == claim_at) {
          schedule.advance(params);
          describe(i + 1, schedule.tile(params));
        }
        load_k(tile, n);
        if (n < tile.end - 1) {
          load_v(tile, n + 1);
        } else if (kNextScoresFirst && i > 0) {
          load_last_v(i - 1);
        }
      }
      if (!kNextScoresFirst) load_v(tile, tile.begin);
    }
    if (kNextScoresFirst) load_last_v(i - 1);
  }
};

// Loads q, a warpgroup's rows at a time. With one stage every warpgroup has a warp of its own: its next rows are on
// their way as soon as it has done with these.
constexpr int kQueryWarps = kQStages > 1 ? 1 : kNumConsumers;

struct QueryProducer : Producer {
  const int first_group;

  __device__ QueryProducer(const TiledParams& p, const Addresses& s, int group) : Producer(p, s), first_group(group) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      smem.await_tile(i);
      const Tile tile = smem.tile(i);
      if (tile.row_begin == kNoTile) break;
#pragma unroll 1
      for (int group = first_group; group < kNumConsumers; group += kQueryWarps) {
        const unsigned barrier = smem.q_full(i, group);
        mbarrier_wait(smem.q_empty(i, group), (i / kQStages + 1) & 1);
        if (acts) {
          mbarrier_arrive_expect_tx(barrier, kBytesQ / kNumConsumers);
          load_panels<kPanelsQk>(params.q, smem.q_rows(i, group), kPanelBytesQ, barrier,
                                 tile.row_begin + kGroupRows * group, tile.head, tile.batch);
        }
        __syncwarp();
      }
    }
  }
};
