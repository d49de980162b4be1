// Sequences of several lengths in backward on Hopper: what of them takes part, where it lies, and how a block of threads
// learns of its part in it.
#pragma once
#include "../common/ragged.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/warpgroup.cuh"
#include "panels.cuh"

// The queries of a sequence that see some key, and the keys that some query sees, numbered from the first of each. why
// not the whole sequence: copies are cut off behind the last of these rows, but not before the first. So no other row is
// read; delta.cu numbers queries in the same way.
struct alignas(16) SeenRows {
  int seqlen_q, seqlen_k, lo, hi;  // of the mask
  RaggedMapRows q, k;              // of query 0 and of key 0
  int padded_q;                    // the row of query 0 in what is padded to slots

  SeenRows() = default;
  __device__ SeenRows(const ProblemParams& p, const RaggedSequence& sequence) {
    const Range queries = sequence.seen_queries(), keys = sequence.seen_keys();
    const Mask& mask = sequence.mask();
    const int shift = queries.begin - keys.begin;
    seqlen_q = queries.end - queries.begin, seqlen_k = keys.end - keys.begin;
    lo = mask.lo + shift, hi = mask.hi + shift;
    q = rows_of(p.rows_q, sequence.q_place, queries), k = rows_of(p.rows_k, sequence.k_place, keys);
    padded_q = sequence.padded_q;
  }

  __device__ Mask mask() const { return Mask(seqlen_q, seqlen_k, lo, hi); }

 private:
  __device__ static RaggedMapRows rows_of(int rows, const Place& place, Range seen) {
    return {rows, place.begin + seen.begin, place.begin + seen.end, place.batch};
  }
};

// Rows from query or key `row` on. `at` is the address of RaggedMapRows of the first in shared memory. why read where they
// are needed: L5.
struct RowsInMemory {
  unsigned at;
  int row;

  __device__ __forceinline__ RaggedMapRows read() const {
    unsigned x[4];
    ld_shared_v4(x, at);
    return {static_cast<int>(x[0]), static_cast<int>(x[1]) + row, static_cast<int>(x[2]), static_cast<int>(x[3])};
  }
};

__device__ __forceinline__ RaggedBox boxed(const RowsInMemory& rows, int num_rows, int columns) {
  return boxed(rows.read(), num_rows, columns);
}

// The same as a sequence, of which kernels ask what they ask of `Sequence`. `at` is the address of SeenRows in shared
// memory. why read again wherever it is needed: L5.
struct SeenSequence {
  unsigned at;

  __device__ __forceinline__ int seqlen_q() const { return ld_shared_u32(at); }
  __device__ __forceinline__ int seqlen_k() const { return ld_shared_u32(at + 4); }
  __device__ __forceinline__ Mask mask() const {
    unsigned x[4];
    ld_shared_v4(x, at);
    return Mask(x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ Range seen_queries() const { return {0, seqlen_q()}; }
  __device__ __forceinline__ Range seen_keys() const { return {0, seqlen_k()}; }

  __device__ __forceinline__ static long long query_head(int head) { return head; }
  __device__ __forceinline__ int padded_query(int row) const { return ld_shared_u32(at + 48) + row; }

  __device__ __forceinline__ RowsInMemory seen_queries_from(int query) const { return {at + 16, query}; }
  __device__ __forceinline__ RowsInMemory seen_keys_from(int key) const { return {at + 32, key}; }
  __device__ __forceinline__ RaggedMapRows queries_from(int query) const { return seen_queries_from(query).read(); }
  __device__ __forceinline__ RaggedMapRows keys_from(int key) const { return seen_keys_from(key).read(); }
};
static_assert(sizeof(RaggedMapRows) == 16, "SeenSequence reads the members of SeenRows from other places");

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
