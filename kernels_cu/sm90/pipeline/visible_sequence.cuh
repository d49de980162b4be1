// Variable-length sequences in backward on Hopper: where their rows lie, read from shared memory.
#pragma once
#include "../../common/visible_rows.cuh"
#include "../../common/tile_range.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "panels.cuh"

// Rows from query or key `row` on. `at` is the shared-memory address of the VarlenMapRows of row 0. They are read where
// needed, as they would hold registers (L5).
struct RowsInMemory {
  unsigned at;
  int row;

  __device__ __forceinline__ VarlenMapRows read() const {
    unsigned x[4];
    ld_shared_v4(x, at);
    return {static_cast<int>(x[0]), static_cast<int>(x[1]) + row, static_cast<int>(x[2]), static_cast<int>(x[3])};
  }
};

__device__ __forceinline__ VarlenMapRows read(const RowsInMemory& rows) { return rows.read(); }
__device__ __forceinline__ MapRows read(const MapRows& rows) { return rows; }

__device__ __forceinline__ VarlenBox boxed(const RowsInMemory& rows, int num_rows, int columns) {
  return boxed(rows.read(), num_rows, columns);
}

// A sequence with the interface of `Sequence`. `at` is the shared-memory address of its VisibleRows. Members are read
// again at each use, as they would hold registers (L5).
struct VisibleSequence {
  unsigned at;

  __device__ __forceinline__ int seqlen_q() const { return ld_shared_u32(at); }
  __device__ __forceinline__ int seqlen_k() const { return ld_shared_u32(at + 4); }
  __device__ __forceinline__ Mask mask() const {
    unsigned x[4];
    ld_shared_v4(x, at);
    return Mask(x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ Range visible_queries() const { return {0, seqlen_q()}; }
  __device__ __forceinline__ Range visible_keys() const { return {0, seqlen_k()}; }

  __device__ __forceinline__ static long long query_head(int head) { return head; }
  __device__ __forceinline__ int padded_query(int row) const { return ld_shared_u32(at + 48) + row; }

  __device__ __forceinline__ RowsInMemory visible_queries_from(int query) const { return {at + 16, query}; }
  __device__ __forceinline__ RowsInMemory visible_keys_from(int key) const { return {at + 32, key}; }
  __device__ __forceinline__ VarlenMapRows queries_from(int query) const { return visible_queries_from(query).read(); }
  __device__ __forceinline__ VarlenMapRows keys_from(int key) const { return visible_keys_from(key).read(); }
};
static_assert(sizeof(VarlenMapRows) == 16, "VisibleSequence reads the members of VisibleRows from other places");

// Returns the tiles of `size` keys that all of these queries see entirely; none if some query is past the last one.
__device__ __forceinline__ TileRange unmasked_tiles(const Mask& mask, Range queries, int size) {
  if (queries.end > mask.seqlen_q) return {0, 0};
  return TileRange::inside(mask.full_range(queries.begin, queries.end), size);
}
