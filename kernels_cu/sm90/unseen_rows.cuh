// Sequences of several lengths in backward on Hopper by rows: how a block of threads learns of its part in one, and makes
// zeros of those rows of its gradient that do not take part.
#pragma once
#include "../ptx/warpgroup.cuh"
#include "seen_sequence.cuh"

constexpr int kStoredRows = 16;  // of a gradient, that one copy stores

// Rows of a gradient, of which those that are not seen are to become zeros. They are counted from row `begin`.
struct UnseenRows {
  int num_rows, batch, begin;  // num_rows: of the operand
  Range rows, seen;

  __device__ bool exist() const {
    const Range first = before(), last = after();
    return first.begin < first.end || last.begin < last.end;
  }

  // Begins to store zeros, which are kStoredRows rows of a panel in shared memory, in the bulk group at hand. One thread
  // calls.
  template <int kPanels>
  __device__ void clear(const TensorMap& map, unsigned zeros, int head) const {
    clear<kPanels>(map, zeros, head, before());
    clear<kPanels>(map, zeros, head, after());
  }

 private:
  __device__ Range before() const { return {rows.begin, min(rows.end, seen.begin)}; }
  __device__ Range after() const { return {max(rows.begin, seen.end), rows.end}; }

  template <int kPanels>
  __device__ void clear(const TensorMap& map, unsigned zeros, int head, Range part) const {
#pragma unroll 1
    for (int row = part.begin; row < part.end; row += kStoredRows) {
      const RaggedMapRows from{num_rows, begin + row, begin + part.end, batch};
      store_panels<kPanels>(map, zeros, 0, 0, from, head);
    }
  }
};

// One warp finds out what the block of threads has to do, and leaves it in shared memory. All threads call, and have come
// to a barrier then. The result is false where there is nothing to do. Sequences that are all alike need none of it.
template <class Found, class Storage, class Params>
__device__ __forceinline__ bool find_work(Storage& shared, const Params& params) {
  if constexpr (kLengths) {
    if (threadIdx.x / 32 == 1) {  // why not the first: it may be busy with barriers
      UnseenRows unseen;
      const Found found(params, unseen);
      if (threadIdx.x % 32 == 0) static_cast<Found&>(shared) = found;
      if (unseen.exist()) {
        const unsigned zeros = smem_address(&shared);
#pragma unroll
        for (int i = 0; i < kStoredRows * 128; i += 512) st_shared_v4(zeros + threadIdx.x % 32 * 16 + i, {0, 0, 0, 0});
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          found.clear(params, unseen, zeros);
          bulk_commit();
          bulk_wait_read<0>();  // why: the place is that of a tile, and may be gone with the block of threads
        }
      }
    }
    __syncthreads();
    return static_cast<const Found&>(shared).exists();
  } else {
    __syncthreads();
    return true;
  }
}
