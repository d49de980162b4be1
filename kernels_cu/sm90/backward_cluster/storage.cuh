// Shared memory of backward in clusters, its barriers, the key block of a cluster, and the common state of all roles.
#pragma once
#include "../../ptx/cluster.cuh"
#include "../pipeline/all_steps.cuh"
#include "../pipeline/gradient_fragment.cuh"

constexpr unsigned kPanelBytes = kGroupRows * 128;  // of every operand, as all tiles have 64 rows
constexpr unsigned kBytesQk = kPanelsQk * kPanelBytes, kBytesV = kPanelsV * kPanelBytes;
constexpr unsigned kBytesStats = kBlockQ * 4;
constexpr int kDqColumns = kHeadDim / 2, kDqPanels = kDqColumns / kPanelColumns;  // of a thread block
constexpr unsigned kBytesPeerK = kDqPanels * kPanelBytes;
static_assert(kBlockQ == kGroupRows && kBlockK == 2 * kGroupRows,
              "a thread block has 64 keys, and tiles of 64 queries");
static_assert(kDqColumns % kPanelColumns == 0, "whole panels of k");
// p passes from one warpgroup to another in pieces, through the panels of v that stay in registers. A piece has kPiece
// fragments of 8 queries, of 16 bytes a thread each.
constexpr int kPiece = kVSteps / 4 * kPanelBytes / 2048;
static_assert(kVSteps % 4 == 0 && kBlockQ / 8 % kPiece == 0, "whole panels, whole pieces");

// Registers of a thread of each warpgroup. A product of 128 columns needs 208 beside 128 floats of a gradient; with
// fewer, the compiler waits for each product.
constexpr int kLoaderRegisters = 32, kDvRegisters = 208, kDkRegisters = 208, kDqRegisters = 64;
static_assert(kLoaderRegisters + kDvRegisters + kDkRegisters + kDqRegisters <= 4 * kStartRegisters, "");

struct Storage {
  char k[kBytesQk], v[kBytesV];  // of this thread block
  char peer_k[kBytesPeerK];      // the other thread block's keys, in the columns of dq that are computed here
  char q[kStages][kBytesQk], dout[kStages][kBytesV];
  char ds[2][kPanelBytes];           // of this thread block's keys, and of the other's; rows are queries
  float stats[kStages][2][kBlockQ];  // lse, then delta
  unsigned long long q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages], ds_full, ds_empty;
};
struct alignas(1024) SharedStorage : Storage {};
static_assert(sizeof(SharedStorage) <= kSmemBytes && kSmemBytes - sizeof(SharedStorage) <= 1024,
              "the host's formula for shared memory differs");

// The addresses of the members of SharedStorage.
struct Addresses {
  const SharedStorage& at;
  const unsigned k = smem_address(at.k), v = smem_address(at.v), peer_k = smem_address(at.peer_k), p = v;
  const unsigned q = smem_address(at.q), dout = smem_address(at.dout), ds = smem_address(at.ds);
  const unsigned stats = smem_address(at.stats);
  const unsigned q_full = smem_address(at.q_full), q_empty = smem_address(at.q_empty);
  const unsigned dout_full = smem_address(at.dout_full), dout_empty = smem_address(at.dout_empty);
  const unsigned ds_full = smem_address(&at.ds_full), ds_empty = smem_address(&at.ds_empty);

  __device__ void init() const {
    constexpr int kFills = 1 + 32;  // the loader of tiles, and every lane of the loader of lse and delta
    constexpr int kReleases = 8;    // every warp of two warpgroups releases for itself
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(q_full + 8 * i, kFills), mbarrier_init(q_empty + 8 * i, kReleases);
      mbarrier_init(dout_full + 8 * i, kFills), mbarrier_init(dout_empty + 8 * i, kReleases);
    }
    mbarrier_init(ds_full, 1), mbarrier_init(ds_empty, kReleases);
    mbarrier_init_fence();
  }
};

// Named barriers. The first two have one for each pair of warps of the warpgroups of dv and dk, from that number on.
enum NamedBarrier {
  kPFull = 1,        // a piece of p is in shared memory
  kPEmpty = 5,       // it has been read
  kDsWritten = 9,    // ds of this thread block is written
  kVRead = 10,       // the panels of v that p overwrites have been read
  kDvComputed = 11,  // all warps of the warpgroup of dv have read every tile
};

// Returns threadIdx.x as fresh_thread does. Unsigned, as its divisions are then one shift.
__device__ __forceinline__ unsigned thread() { return fresh_thread(); }

// Returns blockIdx.x by a volatile read, so that values that derive from it hold no registers before they are used.
__device__ __forceinline__ unsigned fresh_block() {
  unsigned block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

// The key block of a cluster. Each thread block has half of its keys, and all steps.
struct ClusterKeyBlock : AnyKeyBlock {
  struct SchedulerStorage {};

  __device__ __forceinline__ ClusterKeyBlock(const Params& p, const SchedulerStorage&) : AnyKeyBlock(p) {
    const unsigned heads = p.problem.batch * (p.problem.heads_q / p.problem.heads_per_kv);
    const HeadBlock at = lpt_order(fresh_block() / 2, p.num_k_blocks, heads, p.heads_in_l2);
    go_to(at.head * p.num_k_blocks + at.block);
    steps = {0, query_tiles().count() * p.problem.heads_per_kv};
  }
};

// The common state of all roles.
struct Role : WithAllSteps<ClusterKeyBlock> {
  const Addresses& smem;
  const unsigned rank = cluster_rank();
  const bool is_leader = threadIdx.x % 32 == 0;

  __device__ __forceinline__ Role(const Params& p, const Addresses& addresses)
      : WithAllSteps<ClusterKeyBlock>(p, {}), smem(addresses) {}

  __device__ __forceinline__ unsigned count() const { return steps.end; }
  __device__ __forceinline__ int first_key() const { return block * kBlockK + rank * kGroupRows; }

  __device__ __forceinline__ unsigned q(unsigned n) const { return smem.q + n % kStages * kBytesQk; }
  __device__ __forceinline__ unsigned dout(unsigned n) const { return smem.dout + n % kStages * kBytesV; }
  // The thread's address in lse of step n; delta is kBytesStats further.
  __device__ __forceinline__ unsigned stats(unsigned n) const {
    return smem.stats + n % kStages * 2 * kBytesStats + thread() % 4 * 8;
  }
  // The thread's address in a piece of p.
  __device__ __forceinline__ unsigned p() const { return smem.p + thread() % 128 * 16; }

  // Waits until the place of step n is empty, or its tile full; releases the tile.
  __device__ __forceinline__ void wait_empty(unsigned empty, unsigned n) const {
    mbarrier_wait(empty + 8 * (n % kStages), n / kStages & 1 ^ 1);
  }
  __device__ __forceinline__ void wait(unsigned full, unsigned n) const {
    mbarrier_wait(full + 8 * (n % kStages), n / kStages & 1);
  }
  __device__ __forceinline__ void release(unsigned empty, unsigned n) const {
    mbarrier_arrive_warp(empty + 8 * (n % kStages), is_leader);
  }

  // Stores the warp's rows of dk or dv, through shared memory that no other warpgroup uses.
  template <int kColumns>
  __device__ __forceinline__ void store(const TensorMap& map, float (&x)[kColumns / 2], float scale,
                                        unsigned place) const {
    const auto of = sequence();
    const unsigned warp = thread() / 32 % 4;
    const int key = first_key() + warp * 16;
    zero_outside(x, key + thread() % 32 / 4, of.visible_keys());
    store_rows<kColumns>(map, x, scale, place + warp * 2048, kPanelBytes, of.keys_from(key), kv_head, is_leader);
    if (is_leader) bulk_wait_read<0>();
  }
};
