// Backward on Hopper by rows: shared memory, and what a block has to do.
#pragma once
#include "gradient_tiles.cuh"

constexpr bool kRowsAreQueries = kGradient == Gradient::kDq, kWithDp = kGradient != Gradient::kDv;
constexpr int kRows = kGroupRows * kNumConsumers, kColumns = kRowsAreQueries ? kBlockK : kBlockQ;
static_assert(kRows == (kRowsAreQueries ? kBlockQ : kBlockK), "the warpgroups share the rows of a block");
constexpr int kOutDim = kGradient == Gradient::kDv ? kHeadDimV : kHeadDim;
static_assert(kOutDim <= kHeadDim, "it leaves from where a was");

constexpr unsigned kPanelBytesRows = kRows * 128, kPanelBytesColumns = kColumns * 128;
constexpr unsigned kBytesA = kPanelsQk * kPanelBytesRows, kBytesC = kWithDp ? kPanelsV * kPanelBytesRows : 0;
constexpr unsigned kBytesB = kPanelsQk * kPanelBytesColumns, kBytesD = kPanelsV * kPanelBytesColumns;
constexpr int kQueries = kRowsAreQueries ? kRows : kColumns;  // of lse and of delta, which come with them
// why more than stages: whoever gives a tile back may still be reading these. An arrival does not wait until earlier
// reads of shared memory have ended, and beside tensor cores that take their operands from there they may last.
constexpr int kStatsSlots = kRowsAreQueries ? 1 : kWithDp ? 4 : 8;
static_assert(kRowsAreQueries || (kStatsSlots > kStages && (!kWithDp || kStatsSlots > kSecondStages)),
              "they are as many");
constexpr int kBoxRows = 32;  // that one copy brings
static_assert(kRows % kBoxRows == 0 && kColumns % kBoxRows == 0, "tiles are whole boxes");

struct alignas(1024) SharedStorage {
  char a[kBytesA];
  char b[kStages][kBytesB], d[kSecondStages][kBytesD];
  char c[kBytesC == 0 ? 16 : kBytesC];
  float stats[kWithDp ? 2 : 1][kStatsSlots][kQueries];  // lse, delta
  unsigned long long b_full[kStages], b_empty[kStages], d_full[kSecondStages], d_empty[kSecondStages];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");

// The slot of step n in a ring of tiles; `parity` is that of the phase in which it is filled.
template <int kDepth>
struct Slot {
  unsigned index, parity;

  __device__ __forceinline__ explicit Slot(unsigned n) : index(n % kDepth), parity(n / kDepth & 1) {}
};

struct Addresses {
  unsigned a, b, c, d, lse, delta, b_full, b_empty, d_full, d_empty;

  __device__ explicit Addresses(const SharedStorage& s)
      : a(smem_address(s.a)),
        b(smem_address(s.b)),
        c(smem_address(s.c)),
        d(smem_address(s.d)),
        lse(smem_address(s.stats[0])),
        delta(smem_address(s.stats[kWithDp])),
        b_full(smem_address(s.b_full)),
        b_empty(smem_address(s.b_empty)),
        d_full(smem_address(s.d_full)),
        d_empty(smem_address(s.d_empty)) {}

  // Of the queries of step n.
  __device__ __forceinline__ unsigned lse_of(unsigned n) const { return lse + n % kStatsSlots * kQueries * 4; }
  __device__ __forceinline__ unsigned delta_of(unsigned n) const { return delta + n % kStatsSlots * kQueries * 4; }

  __device__ void init() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kStages; ++i) mbarrier_init(b_full + 8 * i, 1 + 32), mbarrier_init(b_empty + 8 * i, kReleases);
    constexpr int kFills = kWithDp ? 1 + 32 : 1;  // with lse and delta every lane's
    for (int i = 0; i < kSecondStages; ++i) {
      mbarrier_init(d_full + 8 * i, kFills), mbarrier_init(d_empty + 8 * i, kReleases);
    }
    mbarrier_init_fence();
  }
};

// What a block has to do: a block of rows of a head, over tiles [begin, end) of columns; those of each query head of
// the group where rows are keys.
struct Work {
  int row_begin, batch, head;
  int begin, end;
  int num_heads;  // whose columns are gone over

  // Within heads_together heads the longest blocks of rows under a causal mask come first.
  __device__ __forceinline__ explicit Work(const BackwardParams& p) {
    const unsigned blocks = kRowsAreQueries ? p.num_q_blocks : p.num_k_blocks, together = p.heads_together;
    const unsigned heads = kRowsAreQueries ? p.heads_q : p.heads_q / p.heads_per_kv, all = p.batch * heads;
    const unsigned first = blockIdx.x / (together * blocks) * together;
    const unsigned within = blockIdx.x - first * blocks, num = min(together, all - first);
    const unsigned part = within / num, index = first + within - part * num;
    batch = index / heads, head = index - batch * heads;
    row_begin = (kRowsAreQueries ? blocks - 1 - part : part) * kRows;
    num_heads = kRowsAreQueries ? 1 : p.heads_per_kv;
    const Mask mask = rows_mask(p);
    const KeyRange columns = mask.key_range(row_begin, min(row_begin + kRows, mask.seqlen_q));
    begin = columns.begin / kColumns;
    end = columns.begin < columns.end ? (columns.end + kColumns - 1) / kColumns : begin;
  }

  // Which columns a row sees, by the mask's names: rows are its queries.
  __device__ __forceinline__ static Mask rows_mask(const BackwardParams& p) {
    return kRowsAreQueries ? Mask(p) : Mask(p).transposed();
  }
};
