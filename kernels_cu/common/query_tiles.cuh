// The query tiles of a key block in Hopper's backward, in their order of computation.
#pragma once
#include "mask.cuh"
#include "tile_range.cuh"

// Tiles of kQueries queries that see some of kKeys keys. `context` has `params.deterministic` and the number of all
// query tiles; both are read at each use, because held values cost registers (L5).
template <int kQueries, int kKeys>
struct QueryTilesOf : TileRange {
  int first;

  // Key blocks start at different tiles, so that their additions to dq do not collide (L38). Under a mask that is the
  // first visible tile, else the tile on the diagonal. Deterministic calls walk from the last tile to the first, and
  // add to dq in key order.
  template <class Context>
  __device__ __forceinline__ QueryTilesOf(const Context& context, const Mask& mask, int block) {
    const int key_begin = block * kKeys, key_end = const_min(key_begin + kKeys, mask.seqlen_k);
    TileRange::operator=(TileRange::covering(mask.row_range(key_begin, key_end), kQueries));
    const bool all = begin < end && count() == context.num_query_tiles();
    first = context.params.deterministic ? end - 1
            : all                        ? unsigned(block) * (kKeys / 16) / (kQueries / 16) % context.num_query_tiles()
                                         : begin;
  }

  // Returns the tile of step n of a head, and the tile after tile m.
  template <class Context>
  __device__ __forceinline__ int at(const Context& context, int n) const {
    if (context.params.deterministic) return first - n;
    return first + n >= context.num_query_tiles() ? first + n - context.num_query_tiles() : first + n;
  }
  template <class Context>
  __device__ __forceinline__ static int next(const Context& context, int m) {
    return context.params.deterministic ? m - 1 : m + 1 == context.num_query_tiles() ? 0 : m + 1;
  }
};
