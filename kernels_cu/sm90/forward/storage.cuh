// Shared memory of forward and lse on Hopper: tiles, their barriers, and the descriptions of the block's work.
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

// why so many slots: work is published before the ring has its first k, and read until its rows are stored. The ring
// holds this many work tiles if each has one key tile.
constexpr int kWorkInRing = kHeadDimV > 0 ? kStages / 2 : kStages;
constexpr int kWorkSlots = 16;
static_assert(kWorkInRing + 3 + 2 * kVarlen <= kWorkSlots, "a work tile would be overwritten while it is needed");

constexpr unsigned kWarpPanelBytes = 16 * 128;  // of a warp's rows of out

// Whether the first s of a query block is issued before the last p v of the query block before it; the first weights
// are then made beside that p v. Else that p v goes first, and the rows of out are stored beside the first s. why: L30.
constexpr bool kNextScoresFirst = !kDecode && kHeadDimV > 0 && (kQStages > 1 || kQInRegisters);

// Warps that load q, a warpgroup's rows at a time. With one stage every warpgroup has a warp of its own (L18),
// except that where keys lie in pages one warp loads q, and another v.
constexpr int kQueryWarps = kQStages > 1 || kPaged ? 1 : kNumConsumers;

// Lanes of a warp that give back q. why all if varlen: racecheck counts an arrival for its own lane alone (L41).
// why not for lse: it takes up to 4 %.
constexpr int kLanesOfQ = kVarlen && !kDecode && kHeadDimV > 0 ? 32 : 1;

struct Storage {
  char q[kQStages][kBytesQ];
  char kv[kStages][kBytesSlot];  // the ring of k and v tiles in the order of their use
  // On its way to global memory, or states of rows for other warps: if there is one work tile, in the ring's place.
  char out[4 * kNumConsumers][kWarpsSplitKeys && !kOneTilePerBlock ? kStateBytes / 4
                              : kOutPanels > 0                     ? kOutPanels * kWarpPanelBytes
                                                                   : 16];
  unsigned long long work_full[kWorkSlots];
  unsigned long long q_full[kQStages][kNumConsumers], q_empty[kQStages][kNumConsumers];
  unsigned long long kv_full[kStages], kv_empty[kStages];
  QueryWork work[kWorkSlots];
};

// What only variable-length sequences need.
template <bool kIsVarlen>
struct VarlenStorage {
  __device__ unsigned page_bits_address() const { return 0; }
  __device__ unsigned barriers() const { return 0; }
};
template <>
struct VarlenStorage<true> {
  uint4 page_bits[kStages];      // of the key tile in each slot of the ring, one bit a key: whether its page is there
  unsigned long long edge_full;  // v has arrived of a tile of which some keys are yet to become zeros
  // The next work tile is to be scheduled. why two: of a pair, the second may ask before the scheduler warp saw that
  // the first has, and one barrier does not distinguish two phases that have ended from none.
  unsigned long long requested[kDecode ? 1 : 2];

  __device__ unsigned page_bits_address() const { return smem_address(page_bits); }
  __device__ unsigned barriers() const { return smem_address(&edge_full); }
};

// A key tile of which nothing is known.
struct PlainTile {
  int number;

  __device__ __forceinline__ int n() const { return number; }
  __device__ static constexpr bool is_visible(int) { return true; }
  __device__ static constexpr bool is_full(int) { return false; }
};

// A key tile under a mask_mod. The mask tiles along its rows are those of the warpgroups.
struct GroupsTile {
  int bits;  // bit g: group g sees all of the tile; bit 3 + g: it sees some; from bit 6 on: n

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

// What only block-sparse kernels need.
template <bool kEnabled>
struct MaskTileStorage {
  __device__ unsigned tiles() const { return 0; }
};
template <>
struct MaskTileStorage<true> {
  // GroupsTile::bits of the key tile in each slot of the ring, and of the one after it of the same work.
  uint2 tile_of[kStages];
  unsigned long long requested[2];  // as that of VarlenStorage, for sequences that are all alike

  __device__ unsigned tiles() const { return smem_address(tile_of); }
};

struct alignas(1024) SharedStorage : Storage, VarlenStorage<kVarlen>, MaskTileStorage<kBlockSparse> {};
static_assert(!kOneTilePerBlock || sizeof(Storage::kv) >= kStateBytes, "states of rows take the place of the ring");
// why more at times: the host counts the descriptions of calls with mods, which are the longest.
static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes - sizeof(SharedStorage) <= 1024,
              "the host's formula for shared memory differs");

// Named barriers of a thread block, beside that of __syncthreads(), which is 0. Varlen kernels have two for their
// start, to each of which one side only arrives: the sides come to them at different places, which __syncthreads()
// forbids.
enum NamedBarrier {
  kIssue = 1,         // of the first consumer; the next numbers are those of the others
  kBarriersMade = 4,  // one warp has made the barriers in memory
  kFirstWork = 5,     // the first work tile is published
};

// The addresses of the members of SharedStorage. `i` counts the work tiles of the block.
struct Addresses {
  const SharedStorage& at;
  const unsigned q = smem_address(at.q), kv = smem_address(at.kv), out = smem_address(at.out);
  const unsigned work_full = smem_address(at.work_full), q_barriers = smem_address(at.q_full);
  const unsigned kv_full = smem_address(at.kv_full), kv_empty = smem_address(at.kv_empty);
  const unsigned works = smem_address(at.work), page_bits = at.page_bits_address(), edge_full = at.barriers();
  const unsigned tiles = at.tiles();

  // The key tile in a slot that has arrived. `n` is its number among those of the work.
  __device__ __forceinline__ auto tile(int n, unsigned slot) const {
    if constexpr (kBlockSparse) return GroupsTile(static_cast<int>(ld_shared_u32(tiles + 8 * slot)));
    else return PlainTile{n};
  }

  // Work tile i requests the next one, which the scheduler warp waits for.
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

  // One thread pushes work tile i to the others.
  __device__ __forceinline__ void push(unsigned i, const QueryWork& work) const { write(i, work), publish(i); }
  __device__ __forceinline__ void publish(unsigned i) const { mbarrier_arrive(work_full + 8 * (i % kWorkSlots)); }
  // Its 16 bytes kFirst … kEnd - 1.
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

  // All lanes of a warp copy together.
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
    if (kVarlen && i == 0) return;  // why: it was written before the threads of the block met
    wait_published(i);
  }
  __device__ __forceinline__ void wait_published(unsigned i) const {
    mbarrier_wait(work_full + 8 * (i % kWorkSlots), i / kWorkSlots & 1);
  }

  // Read again wherever it is needed, which holds no registers (L5).
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

  // One thread calls, before any other thread uses the barriers.
  __device__ void init_barriers() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    constexpr int kQCopiers = kDecode ? 32 : 1;   // lanes that copy q, each of which arrives (L41)
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

// If block-sparse: the last key tile whose k the producer has loaded, and the one after it.
struct LoadedTile {
  GroupsTile at{0}, following{0};
  VisibleWalk walk{0, kStep};

  __device__ __forceinline__ int n() const { return at.n(); }

  // Goes to the next key tile that is visible, or to the first one of the work tile. If none is visible, it is any.
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

  // Pushes it to the consumers, through the slot of the ring that holds it.
  __device__ __forceinline__ void push(const Addresses& smem, unsigned slot) const {
    if constexpr (kBlockSparse) st_shared_v2(smem.tiles + 8 * slot, at.bits, following.bits);
  }

 private:
  static constexpr int kStep = -1;  // as in DescendingTiles
};

// The key tile of a consumer's next step. If block-sparse, it is popped a step ahead. why: what is read from shared
// memory comes late while products run, and nothing is to be waited for before the next product is issued.
struct NextTile {
  GroupsTile tile{0};

  __device__ __forceinline__ auto at(int n) const {
    if constexpr (kBlockSparse) return tile;
    else return PlainTile{n};
  }
  // Of the tile after the one in this slot.
  __device__ __forceinline__ void pop(const Addresses& smem, unsigned slot) {
    if constexpr (kBlockSparse) tile = GroupsTile(static_cast<int>(ld_shared_u32(smem.tiles + 8 * slot + 4)));
  }
};

__device__ __forceinline__ const SharedStorage& shared_storage() {
  extern __shared__ __align__(1024) char smem_bytes[];
  return *reinterpret_cast<const SharedStorage*>(smem_bytes);
}

// A warp whose lanes all run together, and whose first lane acts. why: what all lanes have alike is in uniform
// registers (L13).
struct Role {
  const KernelParams& params;
  const Addresses& smem;
  const bool is_leader = threadIdx.x % 32 == 0;
};
