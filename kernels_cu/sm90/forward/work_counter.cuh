// The index of a thread block's next work tile, for forward, lse and decode on Hopper.
#pragma once
#include "../../common/division.cuh"
#include "../../common/tile_scheduler.cuh"
#include "../pipeline/work_tile.cuh"

// The warp that schedules a thread block's work. With lengths or mask tiles it loads no keys, as scheduling takes as
// long as two key tiles.
constexpr int kSchedulerWarp = kVarlen || kBlockSparse ? 3 : 0;

// The first work tile has the thread block's index. The others come from the counter or, without a counter, at a fixed
// stride.
struct WorkCounter {
  unsigned index = blockIdx.x;

  // True if the index stands for two work tiles.
  __device__ __forceinline__ bool is_pair() const { return false; }
  template <class Params, class Addresses>
  __device__ __forceinline__ void write_second(const Params&, const Addresses&, unsigned) const {}

  template <class Params>
  __device__ __forceinline__ void take_next(const Params& params, unsigned num_work) {
    if (params.counter == nullptr) {
      index += gridDim.x;
    } else {
      unsigned taken = 0;
      // A fixed thread, not the first lane, shows the compiler that no other thread counts.
      if (threadIdx.x == 32 * kSchedulerWarp) {
        taken = take_number(params.counter, num_work);
      }
      taken = __shfl_sync(0xffffffffu, taken, 0);
      index = gridDim.x + taken;
    }
  }
};
