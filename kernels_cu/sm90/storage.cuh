// Shared memory of the warp-specialised kernels: tiles as TMA writes them and wgmma reads them, and their barriers.
#pragma once
#include "../common/params.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/wgmma.cuh"

constexpr int kPanelColumns = 64;  // of 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
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
constexpr int kTileSlots = 8;  // the producer is at most kQStages tiles ahead, and the last one's rows are still stored
static_assert(kQStages + 2 <= kTileSlots, "a tile's description is read until its rows are stored");

constexpr unsigned kWarpPanelBytes = 16 * 128;  // of a warp's rows of out

// Where one query block follows another, its first s is issued before the last p v of the one before, and its first
// weights are made beside that p v. With one q stage p v goes first: its time is that in which q arrives, and the rows
// of out are stored beside the first s.
constexpr bool kNextScoresFirst = kHeadDimV > 0 && kQStages > 1;

struct alignas(1024) SharedStorage {
  char q[kQStages][kBytesQ];
  char kv[kStages][kBytesSlot];  // ring of k and v tiles in the order of their use
  char out[4 * kNumConsumers][kOutPanels > 0 ? kOutPanels * kWarpPanelBytes : 16];  // on its way to global memory
  unsigned long long tile_full[kTileSlots];
  unsigned long long q_full[kQStages], q_empty[kQStages];
  unsigned long long kv_full[kStages], kv_empty[kStages];
  int4 tiles[kTileSlots][2];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");

// The same as addresses.
struct Addresses {
  unsigned q, kv, out, tile_full, q_full, q_empty, kv_full, kv_empty, tiles;

  __device__ explicit Addresses(const SharedStorage& storage)
      : q(smem_address(storage.q)),
        kv(smem_address(storage.kv)),
        out(smem_address(storage.out)),
        tile_full(smem_address(storage.tile_full)),
        q_full(smem_address(storage.q_full)),
        q_empty(smem_address(storage.q_empty)),
        kv_full(smem_address(storage.kv_full)),
        kv_empty(smem_address(storage.kv_empty)),
        tiles(smem_address(storage.tiles)) {}

  // One thread, before any other uses them.
  __device__ void init_barriers() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kTileSlots; ++i) mbarrier_init(tile_full + 8 * i, 1);
    for (int i = 0; i < kQStages; ++i) mbarrier_init(q_full + 8 * i, 1), mbarrier_init(q_empty + 8 * i, kReleases);
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
