// Backward on Hopper: shared memory, and what a block has to do.
#pragma once
#include "gradient_tiles.cuh"

constexpr unsigned kPanelBytesQ = kBlockQ * 128;  // of q, dout and ds
constexpr unsigned kPanelBytesK = kBlockK * 128;  // of k and v
constexpr unsigned kBytesQ = kPanelsQk * kPanelBytesQ, kBytesDout = kPanelsV * kPanelBytesQ;
constexpr unsigned kBytesK = kPanelsQk * kPanelBytesK, kBytesV = kPanelsV * kPanelBytesK;
constexpr unsigned kBytesStats = 2 * kBlockQ * 4;
constexpr unsigned kBytesDs = 2 * kPanelBytesQ;

// A tile of dq is shared out by panels of columns or, where it has 128 rows, by rows.
constexpr bool kDqByRows = kBlockQ == 128;
// Or it is made transposed, where its rows are no multiple of 64: a warpgroup's columns of dq are the product's rows.
constexpr bool kDqTransposed = kBlockQ % 64 != 0;
constexpr int kDqColumns = kPanelsQk * kPanelColumns / (kDqByRows ? 1 : 2);  // of a warpgroup
constexpr int kDqFloats = (kDqTransposed ? kBlockQ : kDqColumns) / 2;        // of a thread
constexpr unsigned kBytesDq = 128 * kDqFloats * 4;                           // of a warpgroup
static_assert(kDqByRows || kDqTransposed || kBlockQ == 64, "a warpgroup multiplies 64 rows");
static_assert(kDqColumns % kPanelColumns == 0 && (!kDqTransposed || kDqColumns == 64), "whole panels of k");

struct alignas(1024) SharedStorage {
  char k[kBytesK], v[kBytesV];
  char q[kStages][kBytesQ], dout[kStages][kBytesDout];
  char ds[kDsStages][kBytesDs];
  char dq[kNumConsumers][kBytesDq];  // on its way to global memory, as floats in the order of the fragments …
  char dq_sum[kNumConsumers][kDqTransposed ? 8 : kBytesDq];  // … and what other key blocks have added up there
  float stats[kStages][2][kBlockQ];                          // lse, delta
  unsigned long long q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  unsigned long long kv_empty, sum_full, sum_empty;
  unsigned long long turn_full[2], turn_empty[2], dq_empty[2];  // of even and odd steps
  unsigned turn_modes[2], dq_modes[2];                          // the same; what the warpgroups get
  unsigned shared_rank;
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");

struct Addresses {
  unsigned k, v, q, dout, ds, dq, dq_sum, stats, q_full, q_empty, dout_full, dout_empty, kv_empty, sum_full, sum_empty,
      turn_full, turn_empty, dq_empty, turn_modes, dq_modes, shared_rank;

  __device__ explicit Addresses(const SharedStorage& s)
      : k(smem_address(s.k)),
        v(smem_address(s.v)),
        q(smem_address(s.q)),
        dout(smem_address(s.dout)),
        ds(smem_address(s.ds)),
        dq(smem_address(s.dq)),
        dq_sum(smem_address(kDqTransposed ? s.dq[0] : s.dq_sum[0])),
        stats(smem_address(s.stats)),
        q_full(smem_address(s.q_full)),
        q_empty(smem_address(s.q_empty)),
        dout_full(smem_address(s.dout_full)),
        dout_empty(smem_address(s.dout_empty)),
        kv_empty(smem_address(&s.kv_empty)),
        sum_full(smem_address(&s.sum_full)),
        sum_empty(smem_address(&s.sum_empty)),
        turn_full(smem_address(s.turn_full)),
        turn_empty(smem_address(s.turn_empty)),
        dq_empty(smem_address(s.dq_empty)),
        turn_modes(smem_address(s.turn_modes)),
        dq_modes(smem_address(s.dq_modes)),
        shared_rank(smem_address(&s.shared_rank)) {}

  __device__ void init() const {
    constexpr int kReleases = 4 * kNumConsumers;  // every warp releases for itself
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(q_full + 8 * i, 1), mbarrier_init(q_empty + 8 * i, kReleases);
      mbarrier_init(dout_full + 8 * i, 1), mbarrier_init(dout_empty + 8 * i, kReleases);
    }
    mbarrier_init(kv_empty, kReleases), mbarrier_init(sum_full, 1), mbarrier_init(sum_empty, 32 * kReleases);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(turn_full + 8 * i, 1), mbarrier_init(turn_empty + 8 * i, 1), mbarrier_init(dq_empty + 8 * i, 1);
    }
    mbarrier_init_fence();
  }
};

// Named barriers.
constexpr int kDsBarrier = 1;        // ds of both warpgroups is written
constexpr int kDqReadyBarrier = 2;   // and following: a warpgroup may write its dq
constexpr int kDqFilledBarrier = 4;  // and following: it has
constexpr int kDqSumBarrier = 6;     // and following: its threads have read what is there
constexpr int kKvBarrier = 8;        // both are done with k and v, and the loader waits for the next ones
constexpr int kDqThreads = 128 + 32, kKvThreads = 256 + 32;

// Query tiles that see some key of a block, and the order of them.
struct QueryTiles {
  int begin, end, first;

  // why: key blocks that start together begin at tiles of their own, so that they are not in each other's way in dq:
  // under a mask at the first one that they see; without, as if there were a diagonal. In the order of their keys they
  // follow each other through the same tiles.
  __device__ __forceinline__ QueryTiles(const BackwardParams& p, int block) {
    const int key_begin = block * kBlockK;
    const KeyRange rows = Mask(p).transposed().key_range(key_begin, min(key_begin + kBlockK, p.seqlen_k));
    begin = rows.begin / kBlockQ;
    end = rows.begin < rows.end ? (rows.end + kBlockQ - 1) / kBlockQ : begin;
    const bool all = begin < end && end - begin == p.num_q_blocks;
    first = p.deterministic ? end - 1
            : all           ? unsigned(block) * (kBlockK / 16) / (kBlockQ / 16) % p.num_q_blocks
                            : begin;
  }

  // The tile of step n of a head, and the one after tile m.
  __device__ __forceinline__ int at(const BackwardParams& p, int n) const {
    if (p.deterministic) return first - n;
    return first + n >= p.num_q_blocks ? first + n - p.num_q_blocks : first + n;
  }
  __device__ __forceinline__ static int next(const BackwardParams& p, int m) {
    if (p.deterministic) return m - 1;
    return m + 1 == p.num_q_blocks ? 0 : m + 1;
  }
};

// What every role knows: the key blocks [index, index_end), counted over batch and kv heads, that its block of threads
// takes one after the other, each over its query heads; of the first and the last one perhaps not all steps.
struct Role {
  const TiledBackwardParams& params;
  const Addresses& smem;
  int index, index_end;
  int skipped, last_steps;    // of the first one; of the last one
  int batch, kv_head, block;  // of the one at hand …
  int begin, end;             // … and its steps
  const bool leads = threadIdx.x % 32 == 0;

  // Within heads_together heads the first key blocks of all come first, the longest under a causal mask. why: a block
  // waits for earlier ones alone, which are on the GPU already.
  __device__ __forceinline__ Role(const TiledBackwardParams& tiled, const Addresses& addresses)
      : params(tiled), smem(addresses) {
    const BackwardParams& p = tiled.backward;
    if (blockIdx.x >= p.whole_blocks) {
      const unsigned steps = p.num_q_blocks * p.heads_per_kv, from = (blockIdx.x - p.whole_blocks) * p.shared_steps;
      const unsigned last = min(from + p.shared_steps, p.shared_keys * steps) - 1;
      index = p.shared_first + from / steps, skipped = from % steps;
      index_end = p.shared_first + last / steps + 1, last_steps = last % steps + 1;
      return;
    }
    const unsigned heads_kv = p.heads_q / p.heads_per_kv, all = p.batch * heads_kv, together = p.heads_together;
    const unsigned parts = (p.num_k_blocks + p.key_blocks - 1) / p.key_blocks;
    const unsigned first = blockIdx.x / (together * parts) * together;
    const unsigned within = blockIdx.x - first * parts, num_heads = min(together, all - first);
    const unsigned part = within / num_heads, head = first + within - part * num_heads;
    index = head * p.num_k_blocks + part * p.key_blocks, skipped = 0;
    index_end = min(index + p.key_blocks, (head + 1) * p.num_k_blocks), last_steps = 1 << 30;
  }

  // The next key block, if there is one.
  __device__ __forceinline__ bool enter() {
    if (index == index_end) return false;
    const BackwardParams& p = params.backward;
    const unsigned head = unsigned(index) / p.num_k_blocks, heads_kv = p.heads_q / p.heads_per_kv;
    block = index - head * p.num_k_blocks;
    batch = head / heads_kv, kv_head = head - batch * heads_kv;
    const QueryTiles tiles(p, block);
    begin = skipped, end = (tiles.end - tiles.begin) * p.heads_per_kv;
    skipped = 0;
    if (++index == index_end) end = min(end, last_steps);
    return true;
  }

  // f(query head, query tile) for every step of the key block; `step` counts on over blocks.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) const {
    const BackwardParams& p = params.backward;
    int left = end - begin, head = kv_head * p.heads_per_kv, n = begin;
#pragma unroll 1
    while (left > 0) {
      const QueryTiles tiles(p, block);  // why here: or registers hold it
      const int count = tiles.end - tiles.begin;
      if (n >= count) {
        n -= count, ++head;
        continue;
      }
      int m = tiles.at(p, n);
#pragma unroll 1
      for (int i = min(count - n, left); i > 0; --i, --left, ++step) {
        f(head, m);
        m = QueryTiles::next(p, m);
      }
      n = 0, ++head;
    }
  }

  // The sum of a tile of dq to shared memory.
  __device__ __forceinline__ void fetch_sum(unsigned tile) const {
    if (leads) {
      mbarrier_arrive_expect_tx(smem.sum_full, 2 * kBytesDq);
      bulk_load(smem.dq_sum, dq_acc(tile, 0), 2 * kBytesDq, smem.sum_full);
    }
  }

  // Of a tile of dq in global memory: its counter, and its accumulator.
  __device__ __forceinline__ unsigned tile_index(int head, int m) const {
    const BackwardParams& p = params.backward;
    return (batch * p.heads_q + head) * p.num_q_blocks + m;
  }

  __device__ __forceinline__ float* dq_acc(unsigned tile, int group) const {
    return params.backward.dq_acc + (static_cast<long long>(tile) * kNumConsumers + group) * (kBytesDq / 4);
  }
};
