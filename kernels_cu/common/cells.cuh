// Cells: 64 queries x 64 keys, of which it is known whether a mask of the caller's own shows nothing, a part, or all of
// them (portable/block_mask.cu). Kernels pass over tiles in which nothing is seen, and do not ask the mask in tiles in
// which all is seen.
#pragma once
#include "params.cuh"
#include "tile_range.cuh"

constexpr int kCell = 64;
// What is known of a cell. kNotAsked: the mask of the problem hides it as a whole, so that it is both empty and full.
enum MaskTileKind : signed char { kEmptyCell = 0, kPartialCell = 1, kFullCell = 2, kNotAskedCell = 3 };

// The cells that tiles of a size can touch along one axis. why not those that they do touch: a number that is known has
// loads that are on their way together.
__device__ constexpr int most_cells(int size) {
  return size % kCell == 0 ? size / kCell : kCell % size == 0 ? 1 : size / kCell + 2;
}

// The kinds of a tile's cells: bit 4 r + k tells whether there are some of kind k in the r-th cell along its rows.
struct CellKinds {
  unsigned bits = 0;

  __device__ __forceinline__ static CellKinds all_empty() { return {kOfEach << kEmptyCell}; }
  __device__ __forceinline__ CellKinds of_row(int r) const { return {bits >> 4 * r & 15}; }
  __device__ __forceinline__ bool some_seen() const {
    return (bits & kOfEach * (1u << kPartialCell | 1u << kFullCell)) != 0;
  }
  __device__ __forceinline__ bool some_hidden() const {
    return (bits & kOfEach * (1u << kPartialCell | 1u << kEmptyCell)) != 0;
  }

 private:
  static constexpr unsigned kOfEach = 0x11111111u;
};

// A tile, whether it is the first of a walk, and whether the caller's mask shows all of it; or the end of a list of
// tiles. why one number: registers.
struct SeenTile {
  int bits;

  __device__ __forceinline__ static SeenTile end() { return SeenTile(-1); }
  __device__ __forceinline__ bool is_end() const { return bits < 0; }

  __device__ __forceinline__ explicit SeenTile(int all_bits) : bits(all_bits) {}
  __device__ __forceinline__ SeenTile(int n, bool is_full) : bits(4 * n + is_full) {}
  __device__ __forceinline__ SeenTile(int n, CellKinds kinds) : SeenTile(n, kSkipsFullTiles && !kinds.some_hidden()) {}
  __device__ __forceinline__ int n() const { return bits >> 2; }
  __device__ __forceinline__ bool is_first() const { return (bits & 2) != 0; }
  __device__ __forceinline__ bool is_full() const { return (bits & 1) != 0; }
};

// Tiles of kTile columns beside kRows rows of one head, without those of which nothing is seen. Rows are queries and
// columns keys; with kKeysAsRows it is the other way round. All lanes of a warp ask together.
template <bool kEnabled, class Tiles, int kRows, int kTile, bool kKeysAsRows, class Params>
struct SeenTilesOf {
  __device__ __forceinline__ SeenTilesOf(const Tiles&, const Params&, int, int, Range, int) {}
  __device__ __forceinline__ static SeenTile seen_from(int n) { return {n, false}; }
  __device__ __forceinline__ static int count_seen() { return 0; }
};
template <class Tiles, int kRows, int kTile, bool kKeysAsRows, class Params>
struct SeenTilesOf<true, Tiles, kRows, kTile, kKeysAsRows, Params> : Tiles {
  const signed char* cells;  // of the first row
  int stride_row;            // from cell to cell along the rows, and along the columns
  int stride_column;
  int last_row, last_column;  // the last cells that exist

  // rows: those that exist; if there are none, there are no tiles either. length: of all columns.
  __device__ __forceinline__ SeenTilesOf(const Tiles& all, const Params& own, int batch, int head, Range rows,
                                         int length)
      : Tiles(all),
        cells(own.cells + batch * own.cells_batch + head * own.cells_head),
        stride_row(kKeysAsRows ? 1 : own.cells_row),
        stride_column(kKeysAsRows ? own.cells_row : 1),
        last_row((rows.end - 1) / kCell - rows.begin / kCell),
        last_column((length - 1) / kCell) {
    cells += static_cast<long long>(rows.begin / kCell) * stride_row;
  }

  // The first tile from n on that is seen; if there is none, one that `has` does not have.
  __device__ __forceinline__ SeenTile seen_from(int n) const {
    const int step = Tiles::next(0), lane = threadIdx.x % 32;
#pragma unroll 1
    while (Tiles::has(n)) {
      const CellKinds kinds = look_at(n + step * lane);
      const unsigned found = __ballot_sync(0xffffffffu, kinds.some_seen());
      if (found != 0) {
        const int at = __ffs(found) - 1;
        return {n + step * at, CellKinds{__shfl_sync(0xffffffffu, kinds.bits, at)}};
      }
      n += step * 32;
    }
    return {n, CellKinds::all_empty()};
  }

  // How many tiles are seen.
  __device__ __forceinline__ int count_seen() const {
    const int step = Tiles::next(0), lane = threadIdx.x % 32;
    int count = 0;
#pragma unroll 1
    for (int n = Tiles::first(); Tiles::has(n); n += step * 32) {
      count += __popc(__ballot_sync(0xffffffffu, look_at(n + step * lane).some_seen()));
    }
    return count;
  }

  // The cells of a tile; none if there is no such tile.
  __device__ __forceinline__ CellKinds look_at(int n) const {
    CellKinds kinds;
    if (!Tiles::has(n)) return kinds;
    // why from the first tile's begin: it exists, so that no product is larger than the length.
    const int first_column = n * kTile / kCell;
    const int last = const_min((n * kTile + kTile - 1) / kCell, last_column);
#pragma unroll
    for (int i = 0; i < most_cells(kRows); ++i) {
#pragma unroll
      for (int j = 0; j < most_cells(kTile); ++j) {
        const long long at = static_cast<long long>(const_min(i, last_row)) * stride_row +
                             static_cast<long long>(const_min(first_column + j, last)) * stride_column;
        kinds.bits |= 1u << (4 * i + __ldg(cells + at));
      }
    }
    return kinds;
  }
};

template <class Tiles, int kRows, int kTile, bool kKeysAsRows = false>
using SeenTiles = SeenTilesOf<kBlockSparse, Tiles, kRows, kTile, kKeysAsRows, ModParams>;

// A warp's walk over the tiles that are seen, of which it looks at 32 at a time, a lane at each. All lanes go together.
// why not tile by tile: to find one takes hundreds of cycles, for which a warp that loads tiles has no time.
struct SeenWalk {
  int window;         // the first of the tiles that were looked at last
  unsigned left = 0;  // a bit for each of these that is seen, and is still to come
  CellKinds kinds;    // of this lane's tile

  // step: from a tile to the next one.
  __device__ __forceinline__ SeenWalk(int first, int step) : window(first - 32 * step) {}

  // Whether there is one more. `seen` are the tiles of the walk.
  template <class Seen>
  __device__ __forceinline__ bool has_tile(const Seen& seen, int step) {
#pragma unroll 1
    while (left == 0 && seen.has(window + 32 * step)) {
      window += 32 * step;
      kinds = seen.look_at(window + step * (threadIdx.x % 32));
      left = __ballot_sync(0xffffffffu, kinds.some_seen());
    }
    return left != 0;
  }

  // The next one. `Tile` is made of its number and of its CellKinds.
  template <class Tile>
  __device__ __forceinline__ Tile take(int step) {
    const int at = __ffs(left) - 1;
    left &= left - 1;
    return {window + step * at, CellKinds{__shfl_sync(0xffffffffu, kinds.bits, at)}};
  }
};

// The walk of a loop over tiles; with cells over those that `seen()` gives, which is asked for a tile once.
template <bool kEnabled, class Tiles, class Seen>
struct TileWalkOf {
  const Tiles& tiles;
  int at;

  __device__ __forceinline__ TileWalkOf(const Tiles& all, const Seen&) : tiles(all), at(all.first()) {}

  __device__ __forceinline__ int n() const { return at; }
  __device__ __forceinline__ bool has_tile() const { return tiles.has(at); }
  // The first tile, before the walk goes on.
  __device__ __forceinline__ int first() const { return tiles.first(); }
  __device__ __forceinline__ bool is_first() const { return at == tiles.first(); }
  // Whether the caller's mask shows all of the tile.
  __device__ static constexpr bool is_full() { return false; }
  // To be called once for each tile, before `next`.
  __device__ __forceinline__ void look_ahead() {}
  __device__ __forceinline__ int next() const { return tiles.next(at); }
  __device__ __forceinline__ void go_on() { at = next(); }
};

template <class Tiles, class Seen>
struct TileWalkOf<true, Tiles, Seen> {
  const Tiles& tiles;
  const Seen& seen;
  SeenTile at, following;

  __device__ __forceinline__ TileWalkOf(const Tiles& all, const Seen& seen_tiles)
      : tiles(all), seen(seen_tiles), at(seen().seen_from(all.first())), following(at) {
    at.bits |= 2;
  }

  __device__ __forceinline__ int n() const { return at.n(); }
  __device__ __forceinline__ bool has_tile() const { return tiles.has(n()); }
  __device__ __forceinline__ int first() const { return n(); }
  __device__ __forceinline__ bool is_first() const { return at.is_first(); }
  __device__ __forceinline__ bool is_full() const { return at.is_full(); }
  __device__ __forceinline__ void look_ahead() { following = seen().seen_from(tiles.next(n())); }
  __device__ __forceinline__ int next() const { return following.n(); }
  __device__ __forceinline__ void go_on() { at = following; }
};

template <class Tiles, class Seen>
__device__ __forceinline__ TileWalkOf<kBlockSparse, Tiles, Seen> walk_along(const Tiles& tiles, const Seen& seen) {
  return {tiles, seen};
}
