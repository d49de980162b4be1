// Gathered sums: tables in global memory, to which warps add the values of fragments.
#pragma once
#include "../common/gradient_sums.cuh"
#include "../common/params.cuh"
#include "config.cuh"

// The gathered axes of an array, as in CapturedArray of common/mod_functions.cuh.
struct LookedUpAxes {
  const ModGradientParams& p;

  // Returns the table offset of an index along an axis; a negative index counts from the end.
  __device__ __forceinline__ int way(int axis, int index) const {
    return min(max(index + (index >> 31 & p.extents[axis]), 0), p.extents[axis] - 1) * p.strides[axis];
  }
  __device__ __forceinline__ int way(int axis, long long index) const {
    const long long extent = p.extents[axis];
    return static_cast<int>(min(max(index + (index >> 63 & extent), 0ll), extent - 1)) * p.strides[axis];
  }
};

// The table of a warp; with atomics, one table of all warps.
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

  // Zeroes the warp's own table; an earlier launch has zeroed a shared one.
  __device__ __forceinline__ void zero() const {
    if (is_shared) return;
    for (int i = threadIdx.x % 32; i < count; i += 32) first[i] = 0.0f;
    __syncwarp();
  }

  // Adds the values of a fragment; `places` are int table indices, as bits. All lanes of the warp call it.
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
    // Pairs 8 rows and 8 columns apart are added first: in a table of distances they have one entry.
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

  // Adds the values of lanes with equal indices, in an order that depends only on the lane numbers. The first lane adds
  // the sum to the table. In each round a lane takes the sum of the next lane of its index; every other lane is then
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
