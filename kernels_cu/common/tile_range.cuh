// Ranges of tiles: tile n holds the keys (or queries) n * size … n * size + size - 1. Kernels walk them by
//   for (int n = tiles.first(); tiles.has(n); n = tiles.next(n))
// so that tiles which do not follow each other can be walked by the same loop.
#pragma once
#include "range.cuh"

struct TileRange {
  int begin, end;

  // The tiles from that of the first to that of the last element, which must exist.
  __device__ static constexpr TileRange touched(Range elements, int size) {
    return {elements.begin / size, (elements.end + size - 1) / size};
  }

  // The tiles that hold some of the elements. The range is empty if there is no element.
  __device__ static constexpr TileRange covering(Range elements, int size) {
    const TileRange tiles = touched(elements, size);
    return {tiles.begin, elements.begin < elements.end ? tiles.end : tiles.begin};
  }

  // The tiles whose elements are all in the range.
  __device__ static constexpr TileRange inside(Range elements, int size) {
    return {(elements.begin + size - 1) / size, elements.end / size};
  }

  __device__ constexpr int count() const { return end - begin; }
};

struct AscendingTiles : TileRange {
  __device__ constexpr AscendingTiles(TileRange tiles) : TileRange(tiles) {}

  __device__ constexpr int first() const { return begin; }
  __device__ constexpr int next(int n) const { return n + 1; }
  __device__ constexpr bool has(int n) const { return n < end; }
};

// Kernels whose blocks own queries walk from the last key tile to the first: under a causal mask the tiles that need
// the mask then come first, and the others follow each other.
struct DescendingTiles : TileRange {
  __device__ constexpr DescendingTiles(TileRange tiles) : TileRange(tiles) {}

  __device__ constexpr int first() const { return end - 1; }
  __device__ constexpr int next(int n) const { return n - 1; }
  __device__ constexpr bool has(int n) const { return n >= begin; }
};
