// Sequences of several lengths in backward on Hopper: what of them takes part, where it lies, and how a block of threads
// learns of its part in it.
#pragma once
#include "../common/ragged.cuh"
#include "../ptx/ldmatrix.cuh"

// The queries of a sequence that see some key, and the keys that some query sees, numbered from the first of each. why
// not the whole sequence: copies are cut off behind the last of these rows, but not before the first. So no other row is
// read; delta.cu counts in the same way, and makes zeros of the gradients of all others.
struct alignas(16) SeenRows {
  int seqlen_q, seqlen_k, lo, hi;  // of the mask
  RaggedMapRows q;                 // of query 0 …
  int padded_q;                    // … and its row in what is padded to slots
  RaggedMapRows k;
  int unused;

  SeenRows() = default;
  __device__ SeenRows(const ProblemParams& p, const RaggedSequence& sequence) {
    const Range queries = sequence.seen_queries(), keys = sequence.seen_keys();
    const Mask& mask = sequence.mask();
    const int shift = queries.begin - keys.begin;
    seqlen_q = queries.end - queries.begin, seqlen_k = keys.end - keys.begin;
    lo = mask.lo + shift, hi = mask.hi + shift;
    const Place &in_q = sequence.q_place, &in_k = sequence.k_place;
    q = RaggedMapRows::of(p.rows_q, in_q.begin + queries.begin, in_q.begin + queries.end, in_q.batch);
    k = RaggedMapRows::of(p.rows_k, in_k.begin + keys.begin, in_k.begin + keys.end, in_k.batch);
    padded_q = sequence.padded_q;
  }

  __device__ Mask mask() const { return Mask(seqlen_q, seqlen_k, lo, hi); }
};

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
  __device__ __forceinline__ int padded_query(int row) const { return ld_shared_u32(at + 28) + row; }

  __device__ __forceinline__ RaggedMapRows queries_from(int query) const { return rows(at + 16).from(query); }
  __device__ __forceinline__ RaggedMapRows keys_from(int key) const { return rows(at + 32).from(key); }
  __device__ __forceinline__ RaggedMapRows seen_queries_from(int query) const { return queries_from(query); }
  __device__ __forceinline__ RaggedMapRows seen_keys_from(int key) const { return keys_from(key); }

 private:
  __device__ __forceinline__ static RaggedMapRows rows(unsigned from) {
    unsigned x[4];
    ld_shared_v4(x, from);
    return {static_cast<int>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2])};
  }
};

// One warp finds out what the block of threads has to do, and leaves it in shared memory. All threads call, and have come
// to a barrier then. The result is false where there is nothing to do. Sequences that are all alike need none of it.
template <class Found, class Params>
__device__ __forceinline__ bool find_work(Found& shared, const Params& params) {
  if constexpr (kLengths) {
    if (threadIdx.x / 32 == 1) {  // why not the first: it may be busy with barriers
      const Found found(params);
      if (threadIdx.x % 32 == 0) shared = found;
    }
    __syncthreads();
    return shared.exists();
  } else {
    __syncthreads();
    return true;
  }
}
