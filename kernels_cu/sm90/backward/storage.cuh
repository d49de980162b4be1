// Shared memory of backward on Hopper, its barriers, and the common state of all roles.
#pragma once
#include "scheduler.cuh"
#include "../pipeline/gradient_fragment.cuh"

constexpr unsigned kPanelBytesQ = kBlockQ * 128;  // of q, dout and ds
constexpr unsigned kPanelBytesK = kBlockK * 128;  // of k and v
constexpr unsigned kBytesQ = kPanelsQk * kPanelBytesQ, kBytesDout = kPanelsV * kPanelBytesQ;
constexpr unsigned kBytesK = kPanelsQk * kPanelBytesK, kBytesV = kPanelsV * kPanelBytesK;
constexpr unsigned kBytesStats = 2 * kBlockQ * 4, kBytesDs = 2 * kPanelBytesQ;

// The warpgroups share a tile of dq by panels of columns or, if it has 128 rows, by rows.
constexpr bool kDqByRows = kBlockQ == 128;
// If a tile's rows are no multiple of 64, dq is computed transposed: columns are the product's rows. With more than two
// panels of columns, a warpgroup computes all columns of half of the queries.
constexpr bool kDqTransposed = kBlockQ % 64 != 0;
constexpr bool kDqByQueries = kDqTransposed && kPanelsQk > 2;
constexpr int kDqQueries = kDqByQueries ? kBlockQ / 2 : kBlockQ;  // of a warpgroup, if transposed
// A warpgroup's dq: its columns, their panels, its floats in a thread, its bytes.
constexpr int kDqColumns = kDqByRows      ? const_min(kHeadDim, kPanelColumns)
                           : kDqByQueries ? kPanelsQk * kPanelColumns
                                          : kPanelsQk * kPanelColumns / 2;
constexpr int kDqPanels = (kDqColumns + kPanelColumns - 1) / kPanelColumns;
constexpr int kDqFloats = kDqTransposed ? kDqPanels * kDqQueries / 2 : kDqColumns / 2;
constexpr unsigned kBytesFragments = 128 * kDqFloats * 4;
// With accumulate a warpgroup's rows leave in whole panels of 32 floats. They need no room for a sum.
constexpr unsigned kBytesDq = kAccumulates && kDqByRows ? kGroupRows * ((kDqColumns + 31) / 32 * 128) : kBytesFragments;
constexpr unsigned kBytesDqSum = kDqTransposed ? 8 : 2 * kBytesFragments - kBytesDq;
static_assert(kDqByRows || kDqTransposed || kBlockQ == 64, "a warpgroup multiplies 64 rows");
static_assert(kDqByRows ? kPanelsQk == 1 : kDqColumns % kPanelColumns == 0, "whole panels of k");
static_assert(!kDqTransposed || kDqByQueries || kDqColumns == 64, "a warpgroup multiplies 64 rows");
static_assert(kDqQueries % 8 == 0, "whole atoms of the swizzle");

struct Storage {
  char k[kBytesK], v[kBytesV];
  char q[kStages][kBytesQ], dout[kStages][kBytesDout];
  char ds[kDsStages][kBytesDs];
  char dq[kNumConsumers][kBytesDq];         // on its way to global memory, as floats: in fragment order, or rows
  char dq_sum[kNumConsumers][kBytesDqSum];  // the sum of the other key blocks
  float stats[kStages][2][kBlockQ];         // lse, then delta
  unsigned long long q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  unsigned long long kv_empty, sum_full, sum_empty;
  unsigned long long semaphore_full[2], semaphore_empty[2], dq_empty[2];  // of even and of odd steps
  unsigned semaphore_modes[2], dq_modes[2];  // of even and of odd steps, for DqWarp and for consumers
  unsigned shared_rank;
};
struct alignas(1024) SharedStorage : Storage, KeyWork::SchedulerStorage {};
// The host counts a ring of work tiles (WorkRing), which only varlen has: up to one unit of 1024 bytes.
static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes - sizeof(SharedStorage) <= 1024,
              "the host's formula for shared memory differs");

// The addresses of the members of SharedStorage.
struct Addresses {
  const SharedStorage& at;
  const unsigned k = smem_address(at.k), v = smem_address(at.v), q = smem_address(at.q), dout = smem_address(at.dout);
  const unsigned ds = smem_address(at.ds), dq = smem_address(at.dq), stats = smem_address(at.stats);
  const unsigned dq_sum = smem_address(kDqTransposed ? at.dq[0] : at.dq_sum[0]);
  const unsigned q_full = smem_address(at.q_full), q_empty = smem_address(at.q_empty);
  const unsigned dout_full = smem_address(at.dout_full), dout_empty = smem_address(at.dout_empty);
  const unsigned kv_empty = smem_address(&at.kv_empty), dq_empty = smem_address(at.dq_empty);
  const unsigned sum_full = smem_address(&at.sum_full), sum_empty = smem_address(&at.sum_empty);
  const unsigned semaphore_full = smem_address(at.semaphore_full), semaphore_empty = smem_address(at.semaphore_empty);
  const unsigned semaphore_modes = smem_address(at.semaphore_modes), dq_modes = smem_address(at.dq_modes);
  const unsigned shared_rank = smem_address(&at.shared_rank);

  __device__ void init() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(q_full + 8 * i, 1), mbarrier_init(q_empty + 8 * i, kReleases);
      mbarrier_init(dout_full + 8 * i, 1), mbarrier_init(dout_empty + 8 * i, kReleases);
    }
    mbarrier_init(kv_empty, kReleases), mbarrier_init(sum_full, 1), mbarrier_init(sum_empty, 32 * kReleases);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(semaphore_full + 8 * i, 1), mbarrier_init(semaphore_empty + 8 * i, 1),
          mbarrier_init(dq_empty + 8 * i, 1);
    }
    at.KeyWork::SchedulerStorage::init();
    mbarrier_init_fence();
  }
};

// Named barriers. Where two are noted, each warpgroup has one, from that number on.
enum NamedBarrier {
  kDsWritten = 1,  // ds of both warpgroups is written
  kDqReady = 2,    // two: the warpgroup may write its dq
  kDqFilled = 4,   // two: it has written its dq
  kDqSumRead = 6,  // two: its threads have read dq_sum
  // Both warpgroups (with kLeavesByDq two: each one) are done with k and v. The loader arrives after its last wait for
  // kv_empty.
  kKeysConsumed = 8,
};
constexpr int kDqThreads = 128 + 32;

// True if dk and dv leave through the shared memory of dq, beside the loads of the next k and v. Warpgroups then do not
// wait for each other. Elsewhere it costs 1 to 2 %, as the last dq must leave first.
constexpr bool kLeavesByDq = kBlockSparse;
constexpr int kKeysThreads = (kLeavesByDq ? 128 : kConsumerThreads) + 32;

// The common state of all roles.
struct Role : KeyWork {
  const Addresses& smem;
  const bool is_leader = threadIdx.x % 32 == 0;

  __device__ __forceinline__ Role(const Params& p, const Addresses& addresses)
      : KeyWork(p, addresses.at), smem(addresses) {}
};
