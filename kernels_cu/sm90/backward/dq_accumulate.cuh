// The sum of a tile of dq over the key blocks that see its queries, by a semaphore (semaphore.cuh). The last key block
// finishes the tile. If deterministic, key blocks add in the order of their keys, and only the counter's upper half,
// which counts additions, is used. With kAccumulates all key blocks add to the float32 rows of the call, and none
// finishes; they take turns only if deterministic.
#pragma once
#include "storage.cuh"
#include "../pipeline/semaphore.cuh"

// The treatment of a key block's tile of dq.
enum DqMode : unsigned {
  kDqAdd,          // add it to the accumulator
  kDqStore,        // store it in the accumulator, as the first
  kDqFinishAlone,  // finish it, as the only one
  kDqFinish,       // finish it with the sum of the others, which is in shared memory once sum_full ends an even phase
  kDqFinishOdd,    // the same, once sum_full ends an odd phase
};

// The rank of a key block among those that add to a tile: by their keys if deterministic, otherwise by arrival.
struct DqOrder {
  int rank, count;

  template <class AnyWork>
  __device__ __forceinline__ DqOrder(const AnyWork& work, int head, int m, unsigned tile) {
    const auto sequence = work.sequence();
    const int row_end = const_min((m + 1) * kBlockQ, sequence.seqlen_q());
    const TileRange keys = TileRange::touched(sequence.mask().key_range(m * kBlockQ, row_end), kBlockK);
    rank = work.block - keys.begin, count = keys.count();
    if constexpr (kBlockSparse) {  // visible key blocks only; portable/tile_counts.cu has counted them
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

// Returns the accumulator of a warpgroup's part of a tile.
__device__ __forceinline__ float* dq_acc(const Role& role, unsigned tile, int group) {
  return role.params.dq_acc + (static_cast<long long>(tile) * kNumConsumers + group) * (kBytesDq / 4);
}

// Issues the load of a tile's sum into shared memory.
__device__ __forceinline__ void fetch_sum(const Role& role, unsigned tile) {
  if (role.is_leader) {
    mbarrier_arrive_expect_tx(role.smem.sum_full, 2 * kBytesDq);
    bulk_load(role.smem.dq_sum, dq_acc(role, tile, 0), 2 * kBytesDq, role.smem.sum_full);
  }
}

// Waits for the semaphores of tiles, ahead of the warps that move the tiles, and fetches sums. It is a warp of its own,
// since counters in memory are a microsecond away (L37). It takes one semaphore after the other, so that no two thread
// blocks wait for each other (L38). Its lanes run together (L13).
struct SemaphoreWarp : Role {
  using Role::Role;

  __device__ __forceinline__ void run() {
    unsigned step = 0, sums = 0;
#pragma unroll 1
    while (next_block()) {
      for_each_step(step, [&](int head, int m, bool) {
        const unsigned slot = step & 1, parity = step / 2 & 1;
        const unsigned tile = dq_tile(head, m);  // before the wait, so that less follows it (L17)
        unsigned* const counter = params.semaphores + tile;
        if constexpr (kAccumulates) {
          mbarrier_wait(smem.semaphore_empty + 8 * slot, parity ^ 1);
          if (params.deterministic) {
            wait_semaphore(counter, 0, DqOrder(*this, head, m, tile).rank, true);
            if (is_leader) fence_proxy_async_global();
          }
          if (is_leader) mbarrier_arrive(smem.semaphore_full + 8 * slot);
          return;
        }
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

// Two warps that move tiles (partial sums or finished rows of dq) to global memory, and signal what they have added
// (L37). One takes the even steps, one the odd steps: an addition completes a microsecond after the consumers may write
// the next tile to shared memory.
struct DqWarp : Role {
  const unsigned odd;

  __device__ __forceinline__ DqWarp(const Params& p, const Addresses& addresses, unsigned odd)
      : Role(p, addresses), odd(odd) {}

  __device__ __forceinline__ void move(unsigned mode, unsigned tile, int group, int head, int m) const {
    const unsigned source = smem.dq + group * kBytesDq;
    if (!kAccumulates && mode < kDqFinishAlone) {
      float* const target = dq_acc(*this, tile, group);
      if (mode == kDqStore) bulk_store(target, source, kBytesDq);
      else bulk_add(target, source, kBytesDq);
      return;
    }
    const auto of = sequence();
    const int first = kDqByRows ? 64 * group : kDqByQueries ? kDqQueries * group : 0;
    const auto rows = of.queries_from(m * kBlockQ + first);
    const int column = kDqByRows || kDqByQueries ? 0 : kDqColumns * group;
    if constexpr (kDqTransposed) {
      constexpr int kBoxRows = kDqQueries % 16 == 0 ? 16 : 8;
#pragma unroll
      for (int box = 0; box < kDqQueries / kBoxRows; ++box) {
        const unsigned staged = source + box * kBoxRows * 128;
        if constexpr (kAccumulates)
          add_panels<kDqColumns>(params.dq_map, staged, kDqQueries * 128, column, rows.from(kBoxRows * box), head);
        else store_panels<kDqPanels>(params.dq_map, staged, kDqQueries * 128, column, rows.from(kBoxRows * box), head);
      }
    } else {
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        const unsigned staged = source + warp * (kBytesDq / 4);
        if constexpr (kAccumulates)
          add_panels<kDqColumns>(params.dq_map, staged, 2048, column, rows.from(16 * warp), head);
        else store_panels<kDqPanels>(params.dq_map, staged, 2048, column, rows.from(16 * warp), head);
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
        unsigned mode = kDqAdd;
        if constexpr (!kAccumulates) {
          // Passed on by this warp, since the consumers signal to it, not to SemaphoreWarp, that they have read the
          // mode (L41).
          if (is_leader) {
            mode = ld_shared_u32(smem.semaphore_modes + 4 * odd);
            st_shared_u32(smem.dq_modes + 4 * odd, mode);
          }
          mode = __shfl_sync(0xffffffffu, mode, 0);
        }
        // Waits until the other warp's tile, of the step before, has been read from shared memory.
        if (step > 0) mbarrier_wait(smem.dq_empty + 8 * (odd ^ 1), odd ? parity : parity ^ 1);
        if (!kAccumulates && kDqTransposed && mode >= kDqFinish) {
          if (is_leader) fence_proxy_async_global();
          // Waits until the consumers are done with the sum's memory in the step before.
          if (step > 0) mbarrier_wait(smem.q_empty + 8 * ((step - 1) % kStages), (step - 1) / kStages & 1);
          fetch_sum(*this, tile);
        }
        // If transposed, one warpgroup after the other: both at once take 1.3 % more time with 80 queries (L32).
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
          mbarrier_arrive(smem.semaphore_empty + 8 * odd);  // only once the tile is handed to the copy engine (L37)
          bulk_wait_read<0>();
          mbarrier_arrive(smem.dq_empty + 8 * odd);
          if (!kAccumulates || params.deterministic) {
            bulk_wait<0>();
            if (mode < kDqFinishAlone) {  // signalled at once: 2 or 4 steps later costs 3 to 10 % (L37)
              fence_proxy_async_global();
              signal_added(params.semaphores + tile);
            }
          }
        }
        __syncwarp();
      });
    }
  }
};
