// The producers of forward and lse, which copy by TMA: one warp deals out work and loads k and v, others load q.
#pragma once
#include "forward_storage.cuh"

// A warp whose lanes all run together, and whose first lane acts. why: L13.
struct Role {
  const TiledForwardParams& params;
  const Addresses& smem;
  const bool leads = threadIdx.x % 32 == 0;
};

// Warp 0 deals out work and fills the ring.
struct KeyProducer : Role {
  RingPosition ring;

  // Loads key tile n of k or v into the ring.
  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, int n, const QueryWork& work) {
    const Sequence sequence = work.sequence(params.problem);
    const unsigned barrier = smem.kv_full + 8 * ring.slot, target = smem.kv + ring.slot * kBytesSlot;
    const int row = sequence.seen_key_coordinate(n * kBlockK);  // why before the wait: L17
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (leads) {
      mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytesK);
      load_panels<kPanels>(map, target, kPanelBytesK, barrier, row, work.kv_head, sequence.batch_coordinate());
    }
    __syncwarp();
    ring.advance();
  }

  __device__ __forceinline__ void describe(unsigned i, const QueryWork& work) const {
    if (leads) smem.describe(i, work);
    __syncwarp();
  }

  __device__ __forceinline__ void load_v(const QueryWork& work, int n) {
    if constexpr (kPanelsV > 0) load<kPanelsV>(params.v_map, n, work);
  }

  // The last p v of a query block is made during the query block after it.
  __device__ __forceinline__ void load_last_v(unsigned i) {
    const QueryWork work = smem.work(i);
    load_v(work, work.keys.begin);
  }

  // why work is read back from shared memory: L5.
  __device__ __forceinline__ void run(const QueryWork& first) {
    WorkQueue queue;
    describe(0, first);
    unsigned i = 0;
#pragma unroll 1
    for (;; ++i) {
      const QueryWork work = smem.work(i);
      if (!work.exists()) break;
      const DescendingTiles tiles = work.keys;
      // The key tile before which the next work is claimed. why so late: L19.
      const int claim_at = params.counter == nullptr ? max(tiles.begin, tiles.end - 4) : tiles.begin;
#pragma unroll 1
      for (int n = tiles.first(); tiles.has(n); n = tiles.next(n)) {
        if (n == claim_at) {
          queue.advance(params);
          describe(i + 1, queue.work(params));
        }
        load<kPanelsQk>(params.k_map, n, work);
        if (n < tiles.end - 1) load_v(work, n + 1);
        else if (kNextScoresFirst && i > 0) load_last_v(i - 1);
      }
      if (!kNextScoresFirst) load_v(work, work.keys.begin);
    }
    if (kNextScoresFirst) load_last_v(i - 1);
  }
};

// Warps that load q, a warpgroup's rows at a time. With one stage every warpgroup has a warp of its own (L18).
constexpr int kQueryWarps = kQStages > 1 ? 1 : kNumConsumers;

struct QueryProducer : Role {
  const int first_group;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      smem.await_work(i);
      const QueryWork work = smem.work(i);
      if (!work.exists()) break;
      const Sequence sequence = work.sequence(params.problem);
#pragma unroll 1
      for (int group = first_group; group < kNumConsumers; group += kQueryWarps) {
        const unsigned barrier = smem.q_full(i, group);
        mbarrier_wait(smem.q_empty(i, group), (i / kQStages + 1) & 1);
        if (leads) {
          const int row = sequence.query_coordinate(work.row_begin + kGroupRows * group);
          mbarrier_arrive_expect_tx(barrier, kBytesQ / kNumConsumers);
          load_panels<kPanelsQk>(params.q_map, smem.q_rows(i, group), kPanelBytesQ, barrier, row, work.head,
                                 sequence.batch_coordinate());
        }
        __syncwarp();
      }
    }
  }
};
