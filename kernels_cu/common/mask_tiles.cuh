// Mask tiles: 64 queries x 64 keys, classified by portable/block_mask.cu as empty, partial or full under a mask_mod.
// Kernels skip tiles without visible pairs, and do not evaluate the mask_mod in full tiles.
#pragma once
#include "params.cuh"
#include "select.cuh"
#include "tile_range.cuh"

constexpr int kMaskTile = 64;
// The class of a mask tile. kHiddenTile: the mask of the problem hides all of it, so that it is both empty and full.
enum MaskTileKind : signed char { kEmptyTile = 0, kPartialTile = 1, kFullTile = 2, kHiddenTile = 3 };

// Returns the most mask tiles that a tile of this size can touch along one axis. The count is a constant, so that all
// loads of a tile are in flight together.
__device__ constexpr int max_mask_tiles(int size) {
  return size % kMaskTile == 0 ? size / kMaskTile : kMaskTile % size == 0 ? 1 : size / kMaskTile + 2;
}

// The kinds of a tile's mask tiles: bit 4 r + k is set if row r of mask tiles has one of kind k.
struct MaskTileKinds {
  unsigned bits = 0;

  __device__ __forceinline__ static MaskTileKinds all_empty() { return {kOfEach << kEmptyTile}; }
  __device__ __forceinline__ MaskTileKinds of_row(int r) const { return {bits >> 4 * r & 15}; }
  __device__ __forceinline__ bool any_visible() const {
    return (bits & kOfEach * (1u << kPartialTile | 1u << kFullTile)) != 0;
  }
  __device__ __forceinline__ bool any_hidden() const {
    return (bits & kOfEach * (1u << kPartialTile | 1u << kEmptyTile)) != 0;
  }

 private:
  static constexpr unsigned kOfEach = 0x11111111u;
};

// A tile index with two flags (first of a walk, full under the mask_mod), or the end of a list. Packed into one number
// to save registers.
struct VisibleTile {
  int bits;

  __device__ __forceinline__ static VisibleTile end() { return VisibleTile(-1); }
  __device__ __forceinline__ bool is_end() const { return bits < 0; }

  __device__ __forceinline__ explicit VisibleTile(int all_bits) : bits(all_bits) {}
  __device__ __forceinline__ VisibleTile(int n, bool is_full) : bits(4 * n + is_full) {}
  __device__ __forceinline__ VisibleTile(int n, MaskTileKinds kinds)
      : VisibleTile(n, kSkipsFullTiles && !kinds.any_hidden()) {}
  __device__ __forceinline__ int n() const { return bits >> 2; }
  __device__ __forceinline__ bool is_first() const { return (bits & 2) != 0; }
  __device__ __forceinline__ bool is_full() const { return (bits & 1) != 0; }
};

// The visible tiles of kTile columns beside kRows rows of one head. Rows are queries and columns keys, or the reverse
// with kKeysAsRows. All lanes of a warp call together.
template <class Tiles, int kRows, int kTile, bool kKeysAsRows, class Params>
struct VisibleTilesOf : Tiles {
  const signed char* mask_tiles;  // at the first row
  int stride_row;                 // strides from mask tile to mask tile, along the rows and along the columns
  int stride_column;
  int last_row, last_column;  // the last mask tiles that exist, along each axis

  // rows: the existing rows; if it is empty, there are no tiles. length: the number of all columns.
  __device__ __forceinline__ VisibleTilesOf(const Tiles& all, const Params& params, int batch, int head, Range rows,
                                            int length)
      : Tiles(all),
        mask_tiles(params.mask_tiles + batch * params.mask_tiles_batch + head * params.mask_tiles_head),
        stride_row(kKeysAsRows ? 1 : params.mask_tiles_row),
        stride_column(kKeysAsRows ? params.mask_tiles_row : 1),
        last_row((rows.end - 1) / kMaskTile - rows.begin / kMaskTile),
        last_column((length - 1) / kMaskTile) {
    mask_tiles += static_cast<long long>(rows.begin / kMaskTile) * stride_row;
  }

  // Returns the first visible tile from n on, or an index for which `has` is false.
  __device__ __forceinline__ VisibleTile visible_from(int n) const {
    const int step = Tiles::next(0), lane = threadIdx.x % 32;
#pragma unroll 1
    while (Tiles::has(n)) {
      const MaskTileKinds kinds = look_at(n + step * lane);
      const unsigned found = __ballot_sync(0xffffffffu, kinds.any_visible());
      if (found != 0) {
        const int at = __ffs(found) - 1;
        return {n + step * at, MaskTileKinds{__shfl_sync(0xffffffffu, kinds.bits, at)}};
      }
      n += step * 32;
    }
    return {n, MaskTileKinds::all_empty()};
  }

  // Returns the number of visible tiles.
  __device__ __forceinline__ int count_visible() const {
    const int step = Tiles::next(0), lane = threadIdx.x % 32;
    int count = 0;
#pragma unroll 1
    for (int n = Tiles::first(); Tiles::has(n); n += step * 32) {
      count += __popc(__ballot_sync(0xffffffffu, look_at(n + step * lane).any_visible()));
    }
    return count;
  }

  // Returns the kinds of a tile's mask tiles, or no kinds if there is no such tile.
  __device__ __forceinline__ MaskTileKinds look_at(int n) const {
    MaskTileKinds kinds;
    if (!Tiles::has(n)) return kinds;
    // Computed from the tile's first column: it exists, so n * kTile is below the length.
    const int first_column = n * kTile / kMaskTile;
    const int last = const_min((n * kTile + kTile - 1) / kMaskTile, last_column);
#pragma unroll
    for (int i = 0; i < max_mask_tiles(kRows); ++i) {
#pragma unroll
      for (int j = 0; j < max_mask_tiles(kTile); ++j) {
        const long long at = static_cast<long long>(const_min(i, last_row)) * stride_row +
                             static_cast<long long>(const_min(first_column + j, last)) * stride_column;
        kinds.bits |= 1u << (4 * i + __ldg(mask_tiles + at));
      }
    }
    return kinds;
  }
};

// The replacement in kernels that are not block-sparse, where every tile is visible.
struct NoVisibleTiles {
  template <class Tiles, class Params>
  __device__ __forceinline__ NoVisibleTiles(const Tiles&, const Params&, int, int, Range, int) {}
  __device__ __forceinline__ static VisibleTile visible_from(int n) { return {n, false}; }
  __device__ static constexpr int count_visible() { return 0; }
};

template <class Tiles, int kRows, int kTile, bool kKeysAsRows = false>
using VisibleTiles = Select<kBlockSparse, VisibleTilesOf<Tiles, kRows, kTile, kKeysAsRows, ModParams>, NoVisibleTiles>;

// A warp's walk over the visible tiles, one lane per tile and 32 tiles per step. All lanes call together. Searching
// tile by tile takes hundreds of cycles each, too long for a warp that loads tiles.
struct VisibleWalk {
  int window;           // the first tile of the 32 that were read last
  unsigned left = 0;    // a bit for each visible tile of these that is not taken yet
  MaskTileKinds kinds;  // kinds of this lane's tile

  // step: the distance from a tile to the next one.
  __device__ __forceinline__ VisibleWalk(int first, int step) : window(first - 32 * step) {}

  // True if a tile is left. `visible` are the tiles of the walk.
  template <class Visible>
  __device__ __forceinline__ bool has_tile(const Visible& visible, int step) {
#pragma unroll 1
    while (left == 0 && visible.has(window + 32 * step)) {
      window += 32 * step;
      kinds = visible.look_at(window + step * (threadIdx.x % 32));
      left = __ballot_sync(0xffffffffu, kinds.any_visible());
    }
    return left != 0;
  }

  // Takes the next tile. `Tile` is constructed from an index and MaskTileKinds.
  template <class Tile>
  __device__ __forceinline__ Tile take(int step) {
    const int at = __ffs(left) - 1;
    left &= left - 1;
    return {window + step * at, MaskTileKinds{__shfl_sync(0xffffffffu, kinds.bits, at)}};
  }
};

// A walk over all tiles.
template <class Tiles>
struct AllTilesWalk {
  const Tiles& tiles;
  int at;

  __device__ __forceinline__ explicit AllTilesWalk(const Tiles& all) : tiles(all), at(all.first()) {}

  __device__ __forceinline__ int n() const { return at; }
  __device__ __forceinline__ bool has_tile() const { return tiles.has(at); }
  // Returns the first tile; valid before the walk advances.
  __device__ __forceinline__ int first() const { return tiles.first(); }
  __device__ __forceinline__ bool is_first() const { return at == tiles.first(); }
  // True if the mask_mod shows all of the tile.
  __device__ static constexpr bool is_full() { return false; }
  // Called once per tile, before `next`.
  __device__ __forceinline__ void look_ahead() {}
  __device__ __forceinline__ int next() const { return tiles.next(at); }
  __device__ __forceinline__ void go_on() { at = next(); }
};

// A walk over the tiles of `visible()`, which is called once per tile.
template <class Tiles, class Visible>
struct VisibleTilesWalk {
  const Tiles& tiles;
  const Visible& visible;
  VisibleTile at, following;

  __device__ __forceinline__ VisibleTilesWalk(const Tiles& all, const Visible& visible_tiles)
      : tiles(all), visible(visible_tiles), at(visible().visible_from(all.first())), following(at) {
    at.bits |= 2;
  }

  __device__ __forceinline__ int n() const { return at.n(); }
  __device__ __forceinline__ bool has_tile() const { return tiles.has(n()); }
  __device__ __forceinline__ int first() const { return n(); }
  __device__ __forceinline__ bool is_first() const { return at.is_first(); }
  __device__ __forceinline__ bool is_full() const { return at.is_full(); }
  __device__ __forceinline__ void look_ahead() { following = visible().visible_from(tiles.next(n())); }
  __device__ __forceinline__ int next() const { return following.n(); }
  __device__ __forceinline__ void go_on() { at = following; }
};

template <class Tiles, class Visible>
__device__ __forceinline__ auto walk_along(const Tiles& tiles, const Visible& visible) {
  if constexpr (kBlockSparse) return VisibleTilesWalk<Tiles, Visible>(tiles, visible);
  else return AllTilesWalk<Tiles>(tiles);
}
