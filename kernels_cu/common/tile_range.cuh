// Ranges of tiles: tile n holds the keys (or queries) n * size … n * size + size - 1. Kernels walk them by
//   for (int n = tiles.first(); tiles.has(n); n = tiles.next(n))
// so that one loop serves consecutive and other sequences of tiles.
#pragma once
#include "range.cuh"

struct TileRange {
  int begin, end;

  // Returns the tiles between the first and the last element, which must exist.
  __device__ static constexpr TileRange touched(Range elements, int size) {
    return {elements.begin / size, (elements.end + size - 1) / size};
  }

  // Returns the tiles that hold some of the elements; empty if there are none.
  __device__ static constexpr TileRange covering(Range elements, int size) {
    const TileRange tiles = touched(elements, size);
    return {tiles.begin, elements.begin < elements.end ? tiles.end : tiles.begin};
  }

  // Returns the tiles whose elements are all in the range.
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

// Tiles from the last to the first, for thread blocks that own queries. Under a causal mask the masked tiles then come
// first, and the unmasked ones are consecutive.
struct DescendingTiles : TileRange {
  __device__ constexpr DescendingTiles(TileRange tiles) : TileRange(tiles) {}

  __device__ constexpr int first() const { return end - 1; }
  __device__ constexpr int next(int n) const { return n - 1; }
  __device__ constexpr bool has(int n) const { return n >= begin; }
};
