// dk and dv of a key block that several thread blocks share (L35), each with some of the steps. Their sums are added up
// by a semaphore (semaphore.cuh), in fragment order. The last thread block has the whole sums.
#pragma once
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/warpgroup.cuh"
#include "../config.cuh"
#include "semaphore.cuh"

// Adds up the thread's elements of the nth shared key block.
template <int kCount>
__device__ __forceinline__ void add_up_shared(float (&x)[kCount], float* acc, unsigned nth, int thread, bool first,
                                              bool last) {
  float4* const at =
      reinterpret_cast<float4*>(acc) + static_cast<long long>(nth) * (kConsumerThreads * kCount / 4) + thread;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float* const y = x + 4 * i;
    if (last) {
      const float4 sum = __ldcg(at + kConsumerThreads * i);
      y[0] += sum.x, y[1] += sum.y, y[2] += sum.z, y[3] += sum.w;
    } else if (first) {
      __stcg(at + kConsumerThreads * i, make_float4(y[0], y[1], y[2], y[3]));
    } else {
      red_add_v4_f32(reinterpret_cast<float*>(at + kConsumerThreads * i), y[0], y[1], y[2], y[3]);
    }
  }
}

// Calls add(first, last) in the order of the semaphore. Returns true in the last of `sharers` thread blocks, whose sums
// are then whole. All consumer threads call; `thread` is their number. rank_place: a word in shared memory.
template <class Add>
__device__ __forceinline__ bool add_in_order(unsigned* counter, unsigned sharers, unsigned rank_place, unsigned barrier,
                                             int thread, Add add) {
  if (thread == 0) {
    const unsigned came = arrive_at(counter), rank = rank_of(came);
    wait_semaphore(counter, came, rank, rank == sharers - 1);
    st_shared_u32(rank_place, rank);
  }
  bar_sync(barrier, kConsumerThreads);
  const unsigned rank = ld_shared_u32(rank_place);
  const bool last = rank == sharers - 1;
  add(rank == 0, last);
  if (last) return true;
  __threadfence();
  bar_sync(barrier, kConsumerThreads);
  if (thread == 0) signal_added(counter);
  return false;
}
