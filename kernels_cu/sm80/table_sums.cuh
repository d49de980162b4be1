// Sums whose places are looked up: tables in global memory, to which warps add what a fragment has.
#pragma once
#include "../common/gradient_sums.cuh"
#include "../common/params.cuh"
#include "config.cuh"

// The axes of an array along which indices are looked up, as in CapturedArray of common/mod_functions.cuh.
struct LookedUpAxes {
  const ModGradientParams& p;

  // The way along an axis of the table to an index, of which a negative one counts from the end.
  __device__ __forceinline__ int way(int axis, int index) const {
    return min(max(index + (index >> 31 & p.extents[axis]), 0), p.extents[axis] - 1) * p.strides[axis];
  }
  __device__ __forceinline__ int way(int axis, long long index) const {
    const long long extent = p.extents[axis];
    return static_cast<int>(min(max(index + (index >> 63 & extent), 0ll), extent - 1)) * p.strides[axis];
  }
};

// The table of a warp, or with atomics that of all.
struct WarpTable {
  float* first;
  int count;
  bool is_shared;

  __device__ __forceinline__ WarpTable(const ModGradientParams& p, int part, int batch, int head)
      : count(p.table_places), is_shared(p.adds_atomically) {
    const long long sequences = p.by_sequence ? p.problem.batch : 1, heads = p.by_head ? p.problem.heads_q : 1;
    const long long number = is_shared ? 0 : part * kNumWarps + threadIdx.x / 32;
    first = p.tables + ((number * sequences + batch) * heads + head) * count;
  }

  // why not of a shared one: a launch before has done so.
  __device__ __forceinline__ void zero() const {
    if (is_shared) return;
    for (int i = threadIdx.x % 32; i < count; i += 32) first[i] = 0.0f;
    __syncwarp();
  }

  // Adds the values of a fragment; places are ints, as bits. All lanes of the warp call.
  template <int kCount>
  __device__ __forceinline__ void add(const float (&places)[kCount], const float (&values)[kCount]) const {
    const int common = __shfl_sync(0xffffffffu, __float_as_int(places[0]), 0);
    bool same = true;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      same &= __float_as_int(places[i]) == common || values[i] == 0.0f;
      sum += values[i];
    }
    if (__all_sync(0xffffffffu, same)) {
      sum = warp_sum(sum);
      if (threadIdx.x % 32 == 0) add_alone(common, sum);
      __syncwarp();
      return;
    }
    // why pairs 8 rows and 8 columns apart: in a table of distances they have one place.
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool upper = i % 4 < 2;
      const int place = __float_as_int(places[i]), before = i - 6, after = i + 6;
      if (!upper && before >= 0 && __all_sync(0xffffffffu, place == __float_as_int(places[before]))) continue;
      float x = values[i];
      if (upper && after < kCount && __all_sync(0xffffffffu, place == __float_as_int(places[after]))) {
        x += values[after];
      }
      add_of_lanes(place, x);
    }
  }

 private:
  __device__ __forceinline__ void add_alone(int place, float x) const {
    if (is_shared) atomicAdd(first + place, x);
    else first[place] += x;
  }

  // Lanes of the same place add up, in an order that depends on nothing but which they are, and the first of them adds
  // the sum to the table. In each round a lane takes the sum of the next one of its place, of which every other is then
  // done.
  __device__ __forceinline__ void add_of_lanes(int place, float x) const {
    if (!__any_sync(0xffffffffu, x != 0.0f)) return;
    const unsigned lane = threadIdx.x % 32, peers = __match_any_sync(0xffffffffu, place);
    const bool is_first = (peers & ((1u << lane) - 1)) == 0;
    unsigned rank = __popc(peers & ((1u << lane) - 1)), above = peers & (0xfffffffeu << lane);
    while (__any_sync(0xffffffffu, above != 0)) {
      const int next = __ffs(above);
      const float other = __shfl_sync(0xffffffffu, x, next == 0 ? lane : next - 1);
      if (next != 0) x += other;
      above &= __ballot_sync(0xffffffffu, rank % 2 == 0);
      rank /= 2;
    }
    if (is_first && x != 0.0f) add_alone(place, x);
    __syncwarp();
  }
};
