// Shared memory of backward_dq_dkv, and its barriers. backward_dq_dkv.cu defines a, b, c and d.
#pragma once
#include "../pipeline/gradient_fragment.cuh"
#include "scheduler.cuh"

static_assert(kOutDim <= kHeadDim, "the gradient leaves through the place of a");

constexpr unsigned kPanelBytesRows = kRows * 128, kPanelBytesColumns = kColumns * 128;
constexpr unsigned kBytesA = kPanelsQk * kPanelBytesRows, kBytesC = kWithDp ? kPanelsV * kPanelBytesRows : 0;
constexpr unsigned kBytesB = kPanelsQk * kPanelBytesColumns, kBytesD = kPanelsV * kPanelBytesColumns;
constexpr int kQueries = kRowsAreQueries ? kRows : kColumns;  // queries whose lse and delta are loaded together
// More slots than stages: a warp that releases a tile may still be reading lse and delta (L40).
constexpr int kStatsSlots = kRowsAreQueries ? 1 : kWithDp ? 4 : 8;
static_assert(kRowsAreQueries || (kStatsSlots > kStages && (!kWithDp || kStatsSlots > kSecondStages)),
              "lse and delta need a slot more than there are tiles");
constexpr int kBoxRows = kColumns;  // rows of a copy; 32 in place of 64 cost varlen calls 4 to 5 % (L17)
static_assert(kRows % kBoxRows == 0, "a block of rows is whole boxes");

struct Storage {
  char a[kBytesA];
  char b[kStages][kBytesB], d[kSecondStages][kBytesD];
  char c[kBytesC == 0 ? 16 : kBytesC];
  float stats[kWithDp ? 2 : 1][kStatsSlots][kQueries];  // lse, then delta
  unsigned long long b_full[kStages], b_empty[kStages], d_full[kSecondStages], d_empty[kSecondStages];
};
struct alignas(1024) SharedStorage : Storage, RowWork::SchedulerStorage {};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");

// The slot of step n in a ring of tiles. `parity` is the parity of the barrier phase that fills the slot.
template <int kDepth>
struct Slot {
  unsigned index, parity;

  __device__ __forceinline__ explicit Slot(unsigned n) : index(n % kDepth), parity(n / kDepth & 1) {}
};

// The addresses of the members of SharedStorage.
struct Addresses {
  const SharedStorage& at;
  const unsigned a = smem_address(at.a), b = smem_address(at.b), c = smem_address(at.c), d = smem_address(at.d);
  const unsigned lse = smem_address(at.stats[0]), delta = smem_address(at.stats[kWithDp]);
  const unsigned b_full = smem_address(at.b_full), b_empty = smem_address(at.b_empty);
  const unsigned d_full = smem_address(at.d_full), d_empty = smem_address(at.d_empty);

  // Addresses of lse and delta of the queries of step n.
  __device__ __forceinline__ unsigned lse_of(unsigned n) const { return lse + n % kStatsSlots * kQueries * 4; }
  __device__ __forceinline__ unsigned delta_of(unsigned n) const { return delta + n % kStatsSlots * kQueries * 4; }

  __device__ void init() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kStages; ++i) mbarrier_init(b_full + 8 * i, 1 + 32), mbarrier_init(b_empty + 8 * i, kReleases);
    constexpr int kFills = kWithDp ? 1 + 32 : 1;  // every lane arrives for its loads of delta
    for (int i = 0; i < kSecondStages; ++i) {
      mbarrier_init(d_full + 8 * i, kFills), mbarrier_init(d_empty + 8 * i, kReleases);
    }
    mbarrier_init_fence();
  }
};
