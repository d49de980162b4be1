// How a tile of dq is added up over the key blocks that see its queries: by a semaphore (semaphore.cuh). The last key
// block finishes the tile. When deterministic, the key blocks add in the order of their keys, and only the half of the
// counter that counts additions is used.
#pragma once
#include "storage.cuh"
#include "semaphore.cuh"

// What happens to a tile of dq.
enum DqMode : unsigned {
  kDqAdd,          // it is added to the accumulator
  kDqStore,        // it is the first, and is stored in the accumulator
  kDqFinishAlone,  // it is the first and the last
  kDqFinish,       // it is the last; the sum of the others is in shared memory once sum_full has ended an even phase
  kDqFinishOdd,    // the same, once sum_full has ended an odd phase
};

// The turn of a key block among those of a tile: in the order of their keys if deterministic, else of arrival.
struct DqOrder {
  int rank, count;

  template <class AnyWork>
  __device__ __forceinline__ DqOrder(const AnyWork& work, int head, int m, unsigned tile) {
    const auto sequence = work.sequence();
    const int row_end = const_min((m + 1) * kBlockQ, sequence.seqlen_q());
    const TileRange keys = TileRange::touched(sequence.mask().key_range(m * kBlockQ, row_end), kBlockK);
    rank = work.block - keys.begin, count = keys.count();
    if constexpr (kBlockSparse) {  // those in which something is seen; portable/tile_counts.cu has counted them
      count = __ldg(work.params.tile_counts + tile);
      if (work.params.deterministic) {
        const AscendingTiles before(TileRange{keys.begin, work.block});
        const VisibleTiles<AscendingTiles, kBlockQ, kBlockK> visible(before, work.params, work.batch, head,
                                                                     {m * kBlockQ, row_end}, sequence.seqlen_k());
        rank = visible.count_visible();
      }
    }
  }
};

// The accumulator of a warpgroup's part of a tile.
__device__ __forceinline__ float* dq_acc(const Role& role, unsigned tile, int group) {
  return role.params.dq_acc + (static_cast<long long>(tile) * kNumConsumers + group) * (kBytesDq / 4);
}

// Begins to load the sum of a tile into shared memory.
__device__ __forceinline__ void fetch_sum(const Role& role, unsigned tile) {
  if (role.is_leader) {
    mbarrier_arrive_expect_tx(role.smem.sum_full, 2 * kBytesDq);
    bulk_load(role.smem.dq_sum, dq_acc(role, tile, 0), 2 * kBytesDq, role.smem.sum_full);
  }
}

// One warp waits for the semaphores of the tiles, ahead of the warps that move the tiles, and fetches sums. Its lanes
// go in step (L13). why a warp of its own: L37. why one semaphore after the other: L38.
struct SemaphoreWarp : Role {
  using Role::Role;

  __device__ __forceinline__ void run() {
    unsigned step = 0, sums = 0;
#pragma unroll 1
    while (next_block()) {
      for_each_step(step, [&](int head, int m, bool) {
        const unsigned slot = step & 1, parity = step / 2 & 1;
        const unsigned tile = dq_tile(head, m);  // why before the wait: L17
        unsigned* const counter = params.semaphores + tile;
        DqOrder order(*this, head, m, tile);
        unsigned value = 0;
        mbarrier_wait(smem.semaphore_empty + 8 * slot, parity ^ 1);
        if (!params.deterministic) {
          if (is_leader) value = arrive_at(counter);
          value = __shfl_sync(0xffffffffu, value, 0);
          order.rank = rank_of(value);
        }
        const bool last = order.rank == order.count - 1;
        wait_semaphore(counter, value, order.rank, last || params.deterministic);
        unsigned mode = order.rank == 0 ? (last ? kDqFinishAlone : kDqStore) : last ? kDqFinish : kDqAdd;
        if (is_leader) fence_proxy_async_global();
        if (mode == kDqFinish) {
          if constexpr (!kDqTransposed) {
            mbarrier_wait(smem.sum_empty, sums & 1 ^ 1);
            fetch_sum(*this, tile);
          }
          mode += sums++ & 1;
        }
        if (is_leader) {
          st_shared_u32(smem.semaphore_modes + 4 * slot, mode);
          mbarrier_arrive(smem.semaphore_full + 8 * slot);
        }
      });
    }
  }
};

// Two warps move tiles to global memory, be it shares or finished rows of dq, and signal what they have added (L37).
// One takes the even steps, one the odd steps. why two: an addition is complete only a microsecond after the consumers
// may write the next tile to shared memory.
struct DqWarp : Role {
  const unsigned odd;

  __device__ __forceinline__ DqWarp(const Params& p, const Addresses& addresses, unsigned odd)
      : Role(p, addresses), odd(odd) {}

  __device__ __forceinline__ void move(unsigned mode, unsigned tile, int group, int head, int m) const {
    const unsigned source = smem.dq + group * kBytesDq;
    if (mode < kDqFinishAlone) {
      float* const target = dq_acc(*this, tile, group);
      if (mode == kDqStore) bulk_store(target, source, kBytesDq);
      else bulk_add(target, source, kBytesDq);
      return;
    }
    const auto of = sequence();
    const auto rows = of.queries_from(m * kBlockQ + (kDqByRows ? 64 * group : 0));
    const int column = kDqByRows ? 0 : kDqColumns * group;
    if constexpr (kDqTransposed) {
#pragma unroll
      for (int box = 0; box < kBlockQ / 16; ++box) {
        store_panels<1>(params.dq_map, source + box * 2048, 0, column, rows.from(16 * box), head);
      }
    } else {
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        store_panels<kDqPanels>(params.dq_map, source + warp * (kBytesDq / 4), 2048, column, rows.from(16 * warp),
                                head);
      }
    }
  }

  __device__ __forceinline__ void run() {
    unsigned step = 0;
#pragma unroll 1
    while (next_block()) {
      for_each_step(step, [&](int head, int m, bool) {
        if ((step & 1) != odd) return;
        const unsigned parity = step / 2 & 1, tile = dq_tile(head, m);
        mbarrier_wait(smem.semaphore_full + 8 * odd, parity);
        unsigned mode = 0;
        if (is_leader) {  // why handed on: the consumers signal to this warp, not SemaphoreWarp, that they have read
                          // the mode (L41)
          mode = ld_shared_u32(smem.semaphore_modes + 4 * odd);
          st_shared_u32(smem.dq_modes + 4 * odd, mode);
        }
        mode = __shfl_sync(0xffffffffu, mode, 0);
        // Waits until the tile of the step before, which is the other warp's, has been read from shared memory.
        if (step > 0) mbarrier_wait(smem.dq_empty + 8 * (odd ^ 1), odd ? parity : parity ^ 1);
        if (kDqTransposed && mode >= kDqFinish) {
          if (is_leader) fence_proxy_async_global();
          // Waits until the consumers are done with the place of the sum, in the step before.
          if (step > 0) mbarrier_wait(smem.q_empty + 8 * ((step - 1) % kStages), (step - 1) / kStages & 1);
          fetch_sum(*this, tile);
        }
        // why not both at once if transposed: L32.
        if constexpr (!kDqTransposed) {
#pragma unroll
          for (int group = 0; group < kNumConsumers; ++group) bar_arrive(kDqReady + group, kDqThreads);
        }
#pragma unroll
        for (int group = 0; group < kNumConsumers; ++group) {
          if constexpr (kDqTransposed) bar_arrive(kDqReady + group, kDqThreads);
          bar_sync(kDqFilled + group, kDqThreads);
          if (is_leader) {
            move(mode, tile, group, head, m);
            bulk_commit();
          }
        }
        if (is_leader) {
          mbarrier_arrive(smem.semaphore_empty + 8 * odd);  // why not before: L37
          bulk_wait_read<0>();
          mbarrier_arrive(smem.dq_empty + 8 * odd);
          bulk_wait<0>();
          if (mode < kDqFinishAlone) {  // why at once: L37
            fence_proxy_async_global();
            signal_added(params.semaphores + tile);
          }
        }
        __syncwarp();
      });
    }
  }
};
