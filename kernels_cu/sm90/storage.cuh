// Shared memory of the warp-specialised kernels: tiles as TMA writes them and wgmma reads them, and their barriers.
#pragma once
#include "../common/params.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "panels.cuh"

constexpr unsigned kPanelBytesQ = kBlockQ * 128;
constexpr unsigned kPanelBytesK = kBlockK * 128;  // of k and of v
constexpr unsigned kBytesQ = kPanelsQk * kPanelBytesQ;
constexpr unsigned kBytesSlot = (kPanelsQk > kPanelsV ? kPanelsQk : kPanelsV) * kPanelBytesK;

// A query block of a head. Its key tiles, in units of kBlockK, are taken from the last to the first; there is always
// one, if only to find that nothing is seen.
struct Tile {
  int row_begin;  // kNoTile once there is no more
  int begin, end;
  int head, kv_head, batch;
};
constexpr int kNoTile = -1;
// why: a tile is described before the ring has its first k, and read until its rows are stored; the ring holds this
// many tiles if each has one key tile.
constexpr int kTilesInRing = kHeadDimV > 0 ? kStages / 2 : kStages;
constexpr int kTileSlots = 16;
static_assert(kTilesInRing + 3 <= kTileSlots, "a tile's description would be written over while it is needed");

constexpr unsigned kWarpPanelBytes = 16 * 128;  // of a warp's rows of out

// Where one query block follows another, its first s is issued before the last p v of the one before, and its first
// weights are made beside that p v. Where q stays in its one stage to the end, p v goes first: its time is that in
// which the next q arrives, and the rows of out are stored beside the first s.
constexpr bool kNextScoresFirst = kHeadDimV > 0 && (kQStages > 1 || kQInRegisters);

struct alignas(1024) SharedStorage {
  char q[kQStages][kBytesQ];
  char kv[kStages][kBytesSlot];  // ring of k and v tiles in the order of their use
  char out[4 * kNumConsumers][kOutPanels > 0 ? kOutPanels * kWarpPanelBytes : 16];  // on its way to global memory
  unsigned long long tile_full[kTileSlots];
  unsigned long long q_full[kQStages][kNumConsumers], q_empty[kQStages][kNumConsumers];
  unsigned long long kv_full[kStages], kv_empty[kStages];
  int4 tiles[kTileSlots][2];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");

// The same as addresses.
struct Addresses {
  unsigned q, kv, out, tile_full, q_barriers, kv_full, kv_empty, tiles;

  __device__ explicit Addresses(const SharedStorage& storage)
      : q(smem_address(storage.q)),
        kv(smem_address(storage.kv)),
        out(smem_address(storage.out)),
        tile_full(smem_address(storage.tile_full)),
        q_barriers(smem_address(storage.q_full)),
        kv_full(smem_address(storage.kv_full)),
        kv_empty(smem_address(storage.kv_empty)),
        tiles(smem_address(storage.tiles)) {}

  // Of tile i: a warpgroup's rows of q, and their barriers.
  __device__ __forceinline__ unsigned q_rows(unsigned i, int group) const {
    return q + i % kQStages * kBytesQ + group * kGroupRows * 128;
  }
  __device__ __forceinline__ unsigned q_full(unsigned i, int group) const {
    return q_barriers + 8 * (i % kQStages * kNumConsumers + group);
  }
  __device__ __forceinline__ unsigned q_empty(unsigned i, int group) const {
    return q_full(i, group) + 8 * kQStages * kNumConsumers;
  }

  // One thread tells the others about tile i.
  __device__ __forceinline__ void describe(unsigned i, const Tile& tile) const {
    const unsigned slot = i % kTileSlots, address = tiles + 32 * slot;
    st_shared_v4(address, {unsigned(tile.row_begin), unsigned(tile.begin), unsigned(tile.end), unsigned(tile.head)});
    st_shared_v4(address + 16, {unsigned(tile.kv_head), unsigned(tile.batch), 0, 0});
    mbarrier_arrive(tile_full + 8 * slot);
  }

  __device__ __forceinline__ void await_tile(unsigned i) const {
    mbarrier_wait(tile_full + 8 * (i % kTileSlots), i / kTileSlots & 1);
  }

  // why: read again where it is needed: registers are few.
  __device__ __forceinline__ Tile tile(unsigned i) const {
    const unsigned address = tiles + 32 * (i % kTileSlots);
    unsigned keys[4], heads[4];
    ld_shared_v4(keys, address);
    ld_shared_v4(heads, address + 16);
    return {int(keys[0]), int(keys[1]), int(keys[2]), int(keys[3]), int(heads[0]), int(heads[1])};
  }

  // One thread, before any other uses them.
  __device__ void init_barriers() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kTileSlots; ++i) mbarrier_init(tile_full + 8 * i, 1);
    for (int i = 0; i < kQStages; ++i) {
      for (int g = 0; g < kNumConsumers; ++g) mbarrier_init(q_full(i, g), 1), mbarrier_init(q_empty(i, g), 4);
    }
    for (int i = 0; i < kStages; ++i) mbarrier_init(kv_full + 8 * i, 1), mbarrier_init(kv_empty + 8 * i, kReleases);
    mbarrier_init_fence();
  }
};

// Position in the ring; `parity` is that of the phase in which its slot is filled.
struct RingPosition {
  unsigned slot = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kStages) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void swap(RingPosition& a, RingPosition& b) {
  const RingPosition old = a;
  a = b, b = old;
}
