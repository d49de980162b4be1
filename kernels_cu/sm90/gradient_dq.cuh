// How a tile of dq is added up over the key blocks that see its queries: in turns. The last one is done with it.
// When deterministic they come in the order of their keys, and of the counter only what has been added counts.
#pragma once
#include "gradient.cuh"
#include "turns.cuh"

enum DqMode : unsigned {
  kDqAdd,
  kDqStore,
  kDqFinishAlone,  // first and last
  kDqFinish,       // the sum of the others is in shared memory once sum_full has ended an even phase …
  kDqFinishOdd,    // … or an odd one
};

// A key block's place among those of a tile, in the order of their keys.
struct DqTurn {
  int rank, count;

  __device__ __forceinline__ DqTurn(const BackwardParams& p, int m, int block) {
    const KeyRange keys = Mask(p).key_range(m * kBlockQ, min((m + 1) * kBlockQ, p.seqlen_q));
    const int begin = keys.begin / kBlockK;
    rank = block - begin, count = (keys.end + kBlockK - 1) / kBlockK - begin;
  }
};

// One warp takes turns at the tiles, ahead of those that move them, and fetches sums. All lanes in step. why a warp of
// its own: counters are a microsecond away, in which no step may wait. why one turn after the other: a block that waits
// for others must not owe them an earlier tile.
struct TurnWarp : Role {
  using Role::Role;

  __device__ __forceinline__ void run() {
    const BackwardParams& p = params.backward;
    unsigned step = 0, sums = 0;
#pragma unroll 1
    while (enter()) {
      for_each_step(step, [&](int head, int m) {
        const unsigned slot = step & 1, parity = step / 2 & 1;
        mbarrier_wait(smem.turn_empty + 8 * slot, parity ^ 1);
        const unsigned tile = tile_index(head, m);
        DqTurn turn(p, m, block);
        unsigned seen = 0;
        if (!p.deterministic) {
          if (leads) seen = come_to(p.turns + tile);
          seen = __shfl_sync(0xffffffffu, seen, 0);
          turn.rank = rank_of(seen);
        }
        const bool last = turn.rank == turn.count - 1;
        await_turn(p.turns + tile, seen, turn.rank, last || p.deterministic);
        unsigned mode = turn.rank == 0 ? (last ? kDqFinishAlone : kDqStore) : last ? kDqFinish : kDqAdd;
        if (leads) fence_proxy_async_global();
        if (mode == kDqFinish) {
          if constexpr (!kDqTransposed) {
            mbarrier_wait(smem.sum_empty, sums & 1 ^ 1);
            fetch_sum(tile);
          }
          mode += sums++ & 1;
        }
        if (leads) {
          st_shared_u32(smem.turn_modes + 4 * slot, mode);
          mbarrier_arrive(smem.turn_full + 8 * slot);
        }
      });
    }
  }
};

// Two warps move tiles of dq to global memory, sums or rows of dq, and tell of what they have added: one the even
// steps, one the odd ones. why two: what is added is complete a microsecond after the next tile may be written to `dq`.
struct DqWarp : Role {
  const unsigned odd;

  __device__ __forceinline__ DqWarp(const TiledBackwardParams& p, const Addresses& addresses, unsigned odd)
      : Role(p, addresses), odd(odd) {}

  __device__ __forceinline__ void move(unsigned mode, int group, int head, int m) const {
    const unsigned source = smem.dq + group * kBytesDq;
    if (mode < kDqFinishAlone) {
      float* const target = dq_acc(tile_index(head, m), group);
      if (mode == kDqStore) bulk_store(target, source, kBytesDq);
      else bulk_add(target, source, kBytesDq);
      return;
    }
    const int row = m * kBlockQ + (kDqByRows ? 64 * group : 0), column = kDqByRows ? 0 : kDqColumns * group;
    if constexpr (kDqTransposed) {
#pragma unroll
      for (int box = 0; box < kBlockQ / 16; ++box) {
        tma_store_4d(&params.dq, source + box * 2048, column, row + 16 * box, head, batch);
      }
    } else {
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
#pragma unroll
        for (int panel = 0; panel < kDqColumns / kPanelColumns; ++panel) {
          tma_store_4d(&params.dq, source + warp * (kBytesDq / 4) + panel * 2048, column + panel * kPanelColumns,
                       row + 16 * warp, head, batch);
        }
      }
    }
  }

  __device__ __forceinline__ void run() {
    unsigned step = 0;
#pragma unroll 1
    while (enter()) {
      for_each_step(step, [&](int head, int m) {
        if ((step & 1) != odd) return;
        const unsigned parity = step / 2 & 1;
        mbarrier_wait(smem.turn_full + 8 * odd, parity);
        unsigned mode = 0;
        if (leads) {  // why handed on: the warpgroups tell this warp that they have read it, at barriers of theirs
          mode = ld_shared_u32(smem.turn_modes + 4 * odd);
          st_shared_u32(smem.dq_modes + 4 * odd, mode);
        }
        mode = __shfl_sync(0xffffffffu, mode, 0);
        // until the other warp's tile, of the step before, has been read
        if (step > 0) mbarrier_wait(smem.dq_empty + 8 * (odd ^ 1), odd ? parity : parity ^ 1);
        if (kDqTransposed && mode >= kDqFinish) {
          if (leads) fence_proxy_async_global();
          // until the warpgroups are done with that place, in the step before
          if (step > 0) mbarrier_wait(smem.q_empty + 8 * ((step - 1) % kStages), (step - 1) / kStages & 1);
          fetch_sum(tile_index(head, m));
        }
        // why not both at once if transposed: one warpgroup a little behind the other is 1 % faster there, else slower.
        if constexpr (!kDqTransposed) {
#pragma unroll
          for (int group = 0; group < kNumConsumers; ++group) bar_arrive(kDqReadyBarrier + group, kDqThreads);
        }
#pragma unroll
        for (int group = 0; group < kNumConsumers; ++group) {
          if constexpr (kDqTransposed) bar_arrive(kDqReadyBarrier + group, kDqThreads);
          bar_sync(kDqFilledBarrier + group, kDqThreads);
          if (leads) {
            move(mode, group, head, m);
            bulk_commit();
          }
        }
        if (leads) {
          mbarrier_arrive(smem.turn_empty + 8 * odd);  // why not before: turns taken that early are waited for longer
          bulk_wait_read<0>();
          mbarrier_arrive(smem.dq_empty + 8 * odd);
          bulk_wait<0>();
          if (mode < kDqFinishAlone) {  // why at once: others may wait for it
            fence_proxy_async_global();
            tell_added(params.backward.turns + tile_index(head, m));
          }
        }
        __syncwarp();
      });
    }
  }
};
