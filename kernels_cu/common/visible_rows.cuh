// The visible rows of a variable-length sequence in Hopper's backward, and their location.
#pragma once
#include "varlen.cuh"

// Queries that see some key, and keys that some query sees, numbered from the first of each. Tensor maps cut copies off
// behind the last of these rows but not before the first, so the numbering skips the rows before it. delta.cu numbers
// queries in the same way.
struct alignas(16) VisibleRows {
  int seqlen_q, seqlen_k, lo, hi;  // mask of the visible rows
  VarlenMapRows q, k;              // locations of query 0 and key 0
  int padded_q;                    // row of query 0 in slot-padded buffers

  VisibleRows() = default;
  __device__ VisibleRows(const ProblemParams& p, const VarlenSequence& sequence) {
    const Range queries = sequence.visible_queries(), keys = sequence.visible_keys();
    const Mask& mask = sequence.mask();
    const int shift = queries.begin - keys.begin;
    seqlen_q = queries.end - queries.begin, seqlen_k = keys.end - keys.begin;
    lo = mask.lo + shift, hi = mask.hi + shift;
    q = rows_of(p.rows_q, sequence.q_place, queries), k = rows_of(p.rows_k, sequence.k_place, keys);
    padded_q = sequence.padded_q;
  }

  __device__ Mask mask() const { return Mask(seqlen_q, seqlen_k, lo, hi); }

  // Returns another lane's rows. All lanes of a warp call together.
  __device__ VisibleRows of_lane(int lane) const {
    auto get = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    auto get_rows = [&](const VarlenMapRows& x) {
      return VarlenMapRows{get(x.rows), get(x.row), get(x.end), get(x.batch)};
    };
    VisibleRows other;
    other.seqlen_q = get(seqlen_q), other.seqlen_k = get(seqlen_k), other.lo = get(lo), other.hi = get(hi);
    other.q = get_rows(q), other.k = get_rows(k), other.padded_q = get(padded_q);
    return other;
  }

 private:
  __device__ static VarlenMapRows rows_of(int rows, const Place& place, Range visible) {
    return {rows, place.begin + visible.begin, place.begin + visible.end, place.batch};
  }
};

// Sequence data that mods read, and the first rows that VisibleRows number.
struct WholeSequence {
  int number, used_queries, used_keys;
  int first_query, first_key;
};

template <bool kEnabled>
struct ListedSeqlensOf {
  ListedSeqlensOf() = default;
  __device__ ListedSeqlensOf(const VarlenSequence&, int) {}
  __device__ ListedSeqlensOf of_lane(int) const { return {}; }
};
template <>
struct ListedSeqlensOf<true> : WholeSequence {
  ListedSeqlensOf() = default;
  __device__ ListedSeqlensOf(const VarlenSequence& x, int sequence_number)
      : WholeSequence{sequence_number, x.seqlen_q(), x.seqlen_k(), x.visible_queries().begin, x.visible_keys().begin} {}

  // Returns another lane's data. All lanes of a warp call together.
  __device__ ListedSeqlensOf of_lane(int lane) const {
    auto get = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    ListedSeqlensOf other;
    other.number = get(number), other.used_queries = get(used_queries), other.used_keys = get(used_keys);
    other.first_query = get(first_query), other.first_key = get(first_key);
    return other;
  }
};
using ListedSeqlens = ListedSeqlensOf<kListsSeqlens>;

// A block of keys or queries of a sequence, as delta.cu lists it for a backward kernel.
struct alignas(16) VisibleBlock : VisibleRows, ListedSeqlens {
  static constexpr int kNone = -1;

  int block;  // index among the sequence's blocks, or kNone

  VisibleBlock() = default;
  __device__ VisibleBlock(const VisibleRows& rows, const ListedSeqlens& sequence, int block_idx)
      : VisibleRows(rows), ListedSeqlens(sequence), block(block_idx) {}
};
static_assert(sizeof(VisibleBlock) == (kListsSeqlens ? 80 : 64), "the host reserves this much for each");

// Assignment of key blocks, counted over the list and kv heads, to thread blocks. The first `whole` key blocks get one
// each, all others get `parts`.
struct alignas(16) KeyShares {
  int listed, whole, parts, unused;
};
