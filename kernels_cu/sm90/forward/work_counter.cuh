// The number of a thread block's next work tile, for forward, lse and decode on Hopper.
#pragma once
#include "../../common/division.cuh"
#include "../../common/tile_scheduler.cuh"
#include "../pipeline/work_tile.cuh"

// The warp that schedules the work of a thread block. why one that loads no keys if it reads lengths or counts mask
// tiles: it takes as long as two key tiles.
constexpr int kSchedulerWarp = kVarlen || kBlockSparse ? 3 : 0;

// The first work tile has the block's index; the others are as the counter hands them out or, without a counter, at a
// fixed distance.
struct WorkCounter {
  unsigned index = blockIdx.x;

  // Whether the number is that of two pieces.
  __device__ __forceinline__ bool is_pair() const { return false; }
  template <class Params, class Addresses>
  __device__ __forceinline__ void write_second(const Params&, const Addresses&, unsigned) const {}

  template <class Params>
  __device__ __forceinline__ void take_next(const Params& params, unsigned num_work) {
    if (params.counter == nullptr) {
      index += gridDim.x;
    } else {
      unsigned taken = 0;
      // why a number, and not the first lane: the compiler then knows that no other thread counts.
      if (threadIdx.x == 32 * kSchedulerWarp) {
        taken = take_number(params.counter, num_work);
      }
      taken = __shfl_sync(0xffffffffu, taken, 0);
      index = gridDim.x + taken;
    }
  }
};
