// How a tile of dq is added up over the key blocks that see its queries: in float32, in global memory. The first block
// stores its share, so that nothing need be zeroed before, others add theirs, and the last adds to its own what is
// there, and is done with it. The counter of a tile tells who is which: how many blocks have come to it (low half), and
// how many have added (high half). In the order of their keys, when deterministic, only the high half counts.
#pragma once
#include "gradient.cuh"

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

// One warp takes turns at the tiles, a step ahead of the one that moves them, and fetches sums. All lanes in step. why
// a warp of its own: counters are a microsecond away, in which no step may wait.
struct TurnWarp : Role {
  static constexpr unsigned kNone = ~0u;
  unsigned told = 0;                    // steps whose adding has been told …
  unsigned untold[2] = {kNone, kNone};  // … and the tiles of the next ones, of those that add

  using Role::Role;

  __device__ __forceinline__ void tell() {
    const unsigned complete = ld_shared_acquire(smem.dq_complete);
    for (; told < complete; ++told) {
      if (leads && untold[0] != kNone) {
        fence_proxy_async_global();
        red_release_add(params.backward.turns + untold[0], 1 << 16);
      }
      untold[0] = untold[1], untold[1] = kNone;
    }
  }

  __device__ __forceinline__ void run() {
    const BackwardParams& p = params.backward;
    unsigned step = 0, sums = 0, sum_step = 0;
#pragma unroll 1
    for (int block = block_begin; block < block_end; ++block) {
      for_each_step(block, step, [&](int head, int m) {
        if (step > 0) mbarrier_wait(smem.turn_empty, (step - 1) & 1);
        tell();
        const unsigned tile = tile_index(head, m);
        DqTurn turn(p, m, block);
        unsigned counter = 0;
        if (!p.deterministic) {
          if (leads) counter = atom_acquire_add(p.turns + tile, 1);
          counter = __shfl_sync(0xffffffffu, counter, 0);
          turn.rank = counter & 0xffff;
        }
        const bool last = turn.rank == turn.count - 1;
        const unsigned wanted = last || p.deterministic ? turn.rank : min(turn.rank, 1);
        // why: others may wait for what this block has to tell.
        while (counter >> 16 < wanted) {
          tell();
          counter = ld_acquire(p.turns + tile);
        }
        unsigned mode = turn.rank == 0 ? (last ? kDqFinishAlone : kDqStore) : last ? kDqFinish : kDqAdd;
        if (leads) fence_proxy_async_global();
        if (mode == kDqFinish) {
          if constexpr (!kDqTransposed) {
            while (ld_shared_acquire(smem.dq_staged) < sum_step) tell();  // the sum before is read
            fetch_sum(tile);
          }
          mode += sums++ & 1;
          sum_step = step + 1;
        }
        if (leads) {
          st_shared_u32(smem.turn_modes + 4 * (step & 1), mode);
          mbarrier_arrive(smem.turn_full);
        }
        const unsigned adds_to = mode < kDqFinishAlone ? tile : kNone;
        if (told == step) untold[0] = adds_to;
        else untold[1] = adds_to;
      });
    }
    while (told < step) tell();
  }
};

// One warp moves tiles of dq to global memory: sums, or rows of dq.
struct DqWarp : Role {
  using Role::Role;

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

  __device__ __forceinline__ void run() const {
    unsigned step = 0;
#pragma unroll 1
    for (int block = block_begin; block < block_end; ++block) {
      for_each_step(block, step, [&](int head, int m) {
        mbarrier_wait(smem.turn_full, step & 1);
        const unsigned mode = ld_shared_u32(smem.turn_modes + 4 * (step & 1));
        __syncwarp();
        if (leads) mbarrier_arrive(smem.turn_empty);
        if (kDqTransposed && mode >= kDqFinish) {
          if (leads) fence_proxy_async_global();
          fetch_sum(tile_index(head, m));
        }
#pragma unroll
        for (int group = 0; group < kNumConsumers; ++group) {
          bar_arrive(kDqReadyBarrier + group, kDqThreads);
          bar_sync(kDqFilledBarrier + group, kDqThreads);
          if (leads) {
            move(mode, group, head, m);
            bulk_commit();
          }
        }
        // why at once: others may wait for it. The warpgroups are in the next step's scores.
        if (leads) {
          st_shared_release(smem.dq_staged, step + 1);
          bulk_wait<0>();
          st_shared_release(smem.dq_complete, step + 1);
        }
        __syncwarp();
      });
    }
  }
};
