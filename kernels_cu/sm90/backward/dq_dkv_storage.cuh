// Shared memory of backward_dq_dkv, and its barriers. backward_dq_dkv.cu says what a, b, c and d are.
#pragma once
#include "gradient_fragment.cuh"
#include "dq_dkv_scheduler.cuh"

static_assert(kOutDim <= kHeadDim, "the gradient leaves through the place of a");

constexpr unsigned kPanelBytesRows = kRows * 128, kPanelBytesColumns = kColumns * 128;
constexpr unsigned kBytesA = kPanelsQk * kPanelBytesRows, kBytesC = kWithDp ? kPanelsV * kPanelBytesRows : 0;
constexpr unsigned kBytesB = kPanelsQk * kPanelBytesColumns, kBytesD = kPanelsV * kPanelBytesColumns;
constexpr int kQueries = kRowsAreQueries ? kRows : kColumns;  // whose lse and delta come together
// why more slots than stages: a warp that gives a tile back may still be reading lse and delta (L40).
constexpr int kStatsSlots = kRowsAreQueries ? 1 : kWithDp ? 4 : 8;
static_assert(kRowsAreQueries || (kStatsSlots > kStages && (!kWithDp || kStatsSlots > kSecondStages)),
              "lse and delta need a slot more than there are tiles");
constexpr int kBoxRows = kColumns;  // rows that one copy brings. why not fewer: L17
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

// The slot of step n in a ring of tiles. `parity` is that of the phase in which the slot is filled.
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

  // lse and delta of the queries of step n.
  __device__ __forceinline__ unsigned lse_of(unsigned n) const { return lse + n % kStatsSlots * kQueries * 4; }
  __device__ __forceinline__ unsigned delta_of(unsigned n) const { return delta + n % kStatsSlots * kQueries * 4; }

  __device__ void init() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kStages; ++i) mbarrier_init(b_full + 8 * i, 1 + 32), mbarrier_init(b_empty + 8 * i, kReleases);
    constexpr int kFills = kWithDp ? 1 + 32 : 1;  // every lane arrives for the delta that it has loaded
    for (int i = 0; i < kSecondStages; ++i) {
      mbarrier_init(d_full + 8 * i, kFills), mbarrier_init(d_empty + 8 * i, kReleases);
    }
    mbarrier_init_fence();
  }
};
