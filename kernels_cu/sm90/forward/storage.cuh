// Shared memory of forward and lse on Hopper: tiles, their barriers, and the thread block's work tiles.
#pragma once
#include "../../common/row_states.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../pipeline/panels.cuh"
#include "../pipeline/state.cuh"
#include "../pipeline/work_tile.cuh"
#include "kernel_params.cuh"

constexpr unsigned kPanelBytesQ = kBlockQ * 128;
constexpr unsigned kPanelBytesK = kBlockK * 128;  // of k and of v
constexpr unsigned kBytesQ = kPanelsQk * kPanelBytesQ;
constexpr unsigned kBytesSlot = (kPanelsQk > kPanelsV ? kPanelsQk : kPanelsV) * kPanelBytesK;

// A work tile is published before the ring has its first k, and read until its rows are stored. If each work tile has
// one key tile, the ring holds kWorkInRing of them.
constexpr int kWorkInRing = kHeadDimV > 0 ? kStages / 2 : kStages;
constexpr int kWorkSlots = 16;
static_assert(kWorkInRing + 3 + 2 * kVarlen <= kWorkSlots, "a work tile would be overwritten while it is needed");

constexpr unsigned kWarpPanelBytes = 16 * 128;  // a warp's rows of out

// True if a query block's first s is issued before the last p v of the block before it. Its weights are then computed
// beside that p v. Otherwise that p v goes first, and rows of out are stored beside the first s. s goes first where its
// q is there in time (L30).
constexpr bool kNextScoresFirst = !kDecode && kHeadDimV > 0 && (kQStages > 1 || kQInRegisters);

// Warps that load q, one warpgroup's rows at a time. With one stage every warpgroup has such a warp (L18), except with
// pages: there one warp loads q, and another v.
constexpr int kQueryWarps = kQStages > 1 || kPaged ? 1 : kNumConsumers;

// Lanes of a warp that release q. If varlen, all do, as racecheck counts an arrival for its own lane alone (L41). In
// lse this takes up to 4 %, so one lane does.
constexpr int kLanesOfQ = kVarlen && !kDecode && kHeadDimV > 0 ? 32 : 1;

struct Storage {
  char q[kQStages][kBytesQ];
  char kv[kStages][kBytesSlot];  // tiles of k and v in the order of their use
  // Rows of out on their way to global memory, or row states for the other warps of split keys. With one work tile the
  // states take the ring's place.
  char out[4 * kNumConsumers][kWarpsSplitKeys && !kOneTilePerBlock ? kStateBytes / 4
                              : kOutPanels > 0                     ? kOutPanels * kWarpPanelBytes
                                                                   : 16];
  unsigned long long work_full[kWorkSlots];
  unsigned long long q_full[kQStages][kNumConsumers], q_empty[kQStages][kNumConsumers];
  unsigned long long kv_full[kStages], kv_empty[kStages];
  QueryWork work[kWorkSlots];
};

// Storage of varlen kernels.
template <bool kIsVarlen>
struct VarlenStorage {
  __device__ unsigned page_bits_address() const { return 0; }
  __device__ unsigned barriers() const { return 0; }
};
template <>
struct VarlenStorage<true> {
  uint4 page_bits[kStages];      // of the key tile in each slot: bit i is 1 if the page of key i exists
  unsigned long long edge_full;  // v has arrived, but some keys of the tile must still become zeros
  // A request for the next work tile. A pair needs two barriers: its second tile may request before the scheduler warp
  // has seen the first request. One barrier does not distinguish two ended phases from none.
  unsigned long long requested[kDecode ? 1 : 2];

  __device__ unsigned page_bits_address() const { return smem_address(page_bits); }
  __device__ unsigned barriers() const { return smem_address(&edge_full); }
};

// A key tile without mask tiles.
struct PlainTile {
  int number;

  __device__ __forceinline__ int n() const { return number; }
  __device__ static constexpr bool is_visible(int) { return true; }
  __device__ static constexpr bool is_full(int) { return false; }
};

// A key tile under a mask_mod. Along its rows, each warpgroup has one mask tile.
struct GroupsTile {
  int bits;  // bit g: group g sees all of the tile; bit 3 + g: it sees some of it; from bit 6 on: n

  __device__ __forceinline__ explicit GroupsTile(int all_bits) : bits(all_bits) {}
  __device__ __forceinline__ GroupsTile(int n, MaskTileKinds kinds) : bits(64 * n) {
#pragma unroll
    for (int group = 0; group < kNumConsumers; ++group) {
      const MaskTileKinds group_kinds = kinds.of_row(group);
      bits |= (group_kinds.any_visible() * 8 | (kSkipsFullTiles && !group_kinds.any_hidden())) << group;
    }
  }
  __device__ __forceinline__ int n() const { return bits >> 6; }
  __device__ __forceinline__ bool is_visible(int group) const { return (bits >> group & 8) != 0; }
  __device__ __forceinline__ bool is_full(int group) const { return (bits >> group & 1) != 0; }
};
static_assert(!kBlockSparse || (kGroupRows == kMaskTile && kNumConsumers <= 3),
              "a warpgroup has two bits for its one mask tile");

// Storage of block-sparse kernels.
template <bool kEnabled>
struct MaskTileStorage {
  __device__ unsigned tiles() const { return 0; }
};
template <>
struct MaskTileStorage<true> {
  // GroupsTile::bits of the key tile in each slot of the ring, and of the work tile's next key tile.
  uint2 tile_of[kStages];
  unsigned long long requested[2];  // as in VarlenStorage, for dense sequences

  __device__ unsigned tiles() const { return smem_address(tile_of); }
};

struct alignas(1024) SharedStorage : Storage, VarlenStorage<kVarlen>, MaskTileStorage<kBlockSparse> {};
static_assert(!kOneTilePerBlock || sizeof(Storage::kv) >= kStateBytes, "states of rows take the place of the ring");
// The host may reserve up to 1024 bytes more: it counts work tiles of calls with mods, which are the largest.
static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes - sizeof(SharedStorage) <= 1024,
              "the host's formula for shared memory differs");

// Named barriers of a thread block; __syncthreads() is number 0. Varlen kernels use two at their start. One side of
// each only arrives, and the sides use different instructions, which __syncthreads() forbids.
enum NamedBarrier {
  kIssue = 1,         // the first consumer's; the other consumers follow
  kBarriersMade = 4,  // one warp has initialised the barriers in memory
  kFirstWork = 5,     // the first work tile is published
};

// The addresses of the members of SharedStorage. `i` counts the work tiles of the thread block.
struct Addresses {
  const SharedStorage& at;
  const unsigned q = smem_address(at.q), kv = smem_address(at.kv), out = smem_address(at.out);
  const unsigned work_full = smem_address(at.work_full), q_barriers = smem_address(at.q_full);
  const unsigned kv_full = smem_address(at.kv_full), kv_empty = smem_address(at.kv_empty);
  const unsigned works = smem_address(at.work), page_bits = at.page_bits_address(), edge_full = at.barriers();
  const unsigned tiles = at.tiles();

  // Returns the key tile in a slot that has arrived. `n` is its number in the work tile.
  __device__ __forceinline__ auto tile(int n, unsigned slot) const {
    if constexpr (kBlockSparse) return GroupsTile(static_cast<int>(ld_shared_u32(tiles + 8 * slot)));
    else return PlainTile{n};
  }

  // The barrier by which work tile i requests the next one from the scheduler warp.
  __device__ __forceinline__ unsigned requested(unsigned i) const {
    return (kVarlen ? edge_full + 8 : tiles + 8 * kStages) + (kDecode ? 0 : i % 2 * 8);
  }
  __device__ __forceinline__ void wait_request(unsigned i) const {
    mbarrier_wait(requested(i), (kDecode ? i : i / 2) & 1);
  }

  // A warpgroup's rows of q, and their barriers.
  __device__ __forceinline__ unsigned q_rows(unsigned i, int group) const {
    return q + i % kQStages * kBytesQ + group * kGroupRows * 128;
  }
  __device__ __forceinline__ unsigned q_full(unsigned i, int group) const {
    return q_barriers + 8 * (i % kQStages * kNumConsumers + group);
  }
  __device__ __forceinline__ unsigned q_empty(unsigned i, int group) const {
    return q_full(i, group) + 8 * kQStages * kNumConsumers;
  }

  // Publishes work tile i to all warps. One thread calls.
  __device__ __forceinline__ void push(unsigned i, const QueryWork& work) const { write(i, work), publish(i); }
  __device__ __forceinline__ void publish(unsigned i) const { mbarrier_arrive(work_full + 8 * (i % kWorkSlots)); }
  // Writes 16-byte pieces kFirst … kEnd - 1 of a work tile.
  template <int kFirst = 0, int kEnd = sizeof(QueryWork) / 16>
  __device__ __forceinline__ void write(unsigned i, const QueryWork& work) const {
    unsigned words[sizeof(QueryWork) / 16][4];
    memcpy(words, &work, sizeof(words));
#pragma unroll
    for (int n = kFirst; n < kEnd; ++n) st_shared_v4(work_address(i) + 16 * n, words[n]);
  }
  __device__ __forceinline__ unsigned work_address(unsigned i) const {
    return works + sizeof(QueryWork) * (i % kWorkSlots);
  }

  // Copies a work tile. All lanes of a warp call.
  __device__ __forceinline__ void copy_work(unsigned from, unsigned to) const {
    const int lane = threadIdx.x % 32;
    if (lane < sizeof(QueryWork) / 16) {
      unsigned words[4];
      ld_shared_v4(words, work_address(from) + 16 * lane);
      st_shared_v4(work_address(to) + 16 * lane, words);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void write_heads(unsigned i, int head, int kv_head) const {
    const QueryWork& work = at.work[i % kWorkSlots];
    st_shared_u32(smem_address(&work.head), head);
    st_shared_u32(smem_address(&work.kv_head), kv_head);
  }

  __device__ __forceinline__ void wait_work(unsigned i) const {
    if (kVarlen && i == 0) return;  // it was published before all warps met at kFirstWork
    wait_published(i);
  }
  __device__ __forceinline__ void wait_published(unsigned i) const {
    mbarrier_wait(work_full + 8 * (i % kWorkSlots), i / kWorkSlots & 1);
  }

  // Work tiles are read again at each use, as they would hold registers (L5).
  __device__ __forceinline__ QueryWork work(unsigned i) const {
    unsigned words[sizeof(QueryWork) / 16][4];
#pragma unroll
    for (int n = 0; n < sizeof(QueryWork) / 16; ++n) {
      ld_shared_v4(words[n], work_address(i) + 16 * n);
    }
    QueryWork work;
    memcpy(&work, words, sizeof(work));
    return work;
  }

  // Initialises the barriers. One thread calls, before any other thread uses them.
  __device__ void init_barriers() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    constexpr int kQCopiers = kDecode ? 32 : 1;   // lanes that copy q; each arrives (racecheck, L41)
    for (int i = 0; i < kWorkSlots; ++i) mbarrier_init(work_full + 8 * i, 1);
    for (int i = 0; i < kQStages; ++i) {
      for (int g = 0; g < kNumConsumers; ++g) {
        mbarrier_init(q_full(i, g), kQCopiers), mbarrier_init(q_empty(i, g), 4 * kLanesOfQ);
      }
    }
    for (int i = 0; i < kStages; ++i) mbarrier_init(kv_full + 8 * i, 1), mbarrier_init(kv_empty + 8 * i, kReleases);
    if (kVarlen) mbarrier_init(edge_full, 1), mbarrier_init(requested(0), 1);
    if (kVarlen && !kDecode) mbarrier_init(requested(1), 1);
    if (kBlockSparse && !kVarlen) mbarrier_init(requested(0), 1), mbarrier_init(requested(1), 1);
    mbarrier_init_fence();
  }
};

// If block-sparse: the key tile whose k was loaded last, and the one after it.
struct LoadedTile {
  GroupsTile at{0}, following{0};
  VisibleWalk walk{0, kStep};

  __device__ __forceinline__ int n() const { return at.n(); }

  // Advances to the next visible key tile, or to the work tile's first one. Without visible tiles, any one serves.
  template <class Params, class AnyWork>
  __device__ __forceinline__ void find_next(const Params& params, const AnyWork& work, bool is_first) {
    if constexpr (kBlockSparse) {
      if (is_first) walk = VisibleWalk(DescendingTiles(work.tiles).first(), kStep);
#pragma unroll 1
      for (int i = is_first ? 0 : 1; i < 2; ++i) {
        at = following;
        following = walk.has_tile(visible_keys(params, work), kStep)
                        ? walk.take<GroupsTile>(kStep)
                        : GroupsTile(work.tiles.begin, MaskTileKinds::all_empty());
      }
    }
  }

  // Pushes the tile to the consumers, through the slot of the ring that holds it.
  __device__ __forceinline__ void push(const Addresses& smem, unsigned slot) const {
    if constexpr (kBlockSparse) st_shared_v2(smem.tiles + 8 * slot, at.bits, following.bits);
  }

 private:
  static constexpr int kStep = -1;  // as in DescendingTiles
};

// The key tile of a consumer's next step. If block-sparse, it is read a step ahead: shared memory is slow while
// products run, and nothing should delay the next product.
struct NextTile {
  GroupsTile tile{0};

  __device__ __forceinline__ auto at(int n) const {
    if constexpr (kBlockSparse) return tile;
    else return PlainTile{n};
  }
  // Reads the tile after the one in this slot.
  __device__ __forceinline__ void pop(const Addresses& smem, unsigned slot) {
    if constexpr (kBlockSparse) tile = GroupsTile(static_cast<int>(ld_shared_u32(smem.tiles + 8 * slot + 4)));
  }
};

__device__ __forceinline__ const SharedStorage& shared_storage() {
  extern __shared__ __align__(1024) char smem_bytes[];
  return *reinterpret_cast<const SharedStorage*>(smem_bytes);
}

// A warp whose lanes run together and whose first lane acts. Values common to all lanes are then in uniform registers
// (L13).
struct Role {
  const KernelParams& params;
  const Addresses& smem;
  const bool is_leader = threadIdx.x % 32 == 0;
};
