// The steps of key blocks in backward on Hopper where no tile is skipped.
#pragma once
#include "key_block.cuh"
#include "step_ring.cuh"

// The steps of the current key block. Each warp computes them, without a ring.
template <class Blocks>
struct WithAllSteps : Blocks, StepRingOf<false, 0> {
  __device__ __forceinline__ WithAllSteps(const Params& p, const typename Blocks::SchedulerStorage& in_memory)
      : Blocks(p, in_memory), StepRingOf<false, 0>({}) {}

  // The loading warp's next_block, which is the same here.
  __device__ __forceinline__ bool lead_block() { return Blocks::next_block(); }

  // Calls f(query head, query tile, true if the mask_mod shows all of it) for every step. `step` counts over all key
  // blocks.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) {
    const Range steps = Blocks::steps;
    int left = steps.end - steps.begin, n = steps.begin;
    int head = Blocks::kv_head * Blocks::params.problem.heads_per_kv;
#pragma unroll 1
    while (left > 0) {
      const QueryTiles tiles = Blocks::query_tiles();  // read again, to hold no registers (L5)
      const int count = tiles.count();
      if (n >= count) {
        n -= count, ++head;
        continue;
      }
      int m = tiles.at(*this, n);
#pragma unroll 1
      for (int i = const_min(count - n, left); i > 0; --i, --left, ++step) {
        f(head, m, false);
        m = QueryTiles::next(*this, m);
      }
      n = 0, ++head;
    }
  }

  // The loading warp's for_each_step, which is the same here.
  template <class F>
  __device__ __forceinline__ void lead_each_step(unsigned& step, F f) {
    for_each_step(step, f);
  }
};
