// What the consumers of forward and lse on Hopper share: their key tiles, their place in the ring, and their scores.
#pragma once
#include "../common/score.cuh"
#include "../ptx/warpgroup.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "softmax.cuh"

constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;

using Scores = float[kBlockK / 2];

// Loads the first columns of a warp's rows of q, as the products take them from registers.
__device__ __forceinline__ void load_query(Query& q, unsigned q_smem) {
  using Panel = Swizzle<8>;
  const int lane = fresh_thread() % 32;
  const unsigned first = q_smem + Panel::offset(lane % 16, lane / 16);
#pragma unroll
  for (int kk = 0; kk < kQSteps; ++kk) {
    ldmatrix_x4(q[kk], Panel::advance(first + kk / 4 * kPanelBytesQ, 0, kk % 4 * 2));
  }
}

// Begins s = q kᵀ. why q from registers as far as it is there: L20.
__device__ __forceinline__ void begin_scores(Scores& s, const Query& q, unsigned q_smem, unsigned k_smem) {
  const unsigned long long q_begin = wgmma_descriptor(q_smem), k_begin = wgmma_descriptor(k_smem);
  begin_scores<kHeadDim, kQSteps>(s, q, q_begin, kPanelBytesQ, k_begin, kPanelBytesK);
}

// Whether a warpgroup may pass over the first and the last key tile, if it sees nothing of them. why not always: L33.
constexpr bool kSkipsTiles = kBlockQ > kBlockK;

// The key tiles of a query block as one warpgroup sees them. The ring holds one more before them if the group
// skips_first, and one after them if it skips_last.
struct GroupKeys {
  TileRange tiles;  // those that the group computes
  bool skips_first = false, skips_last = false;
  TileRange clear;  // those that need no mask

  // may_skip_first: false after a query block whose last key tile was skipped.
  __device__ __forceinline__ GroupKeys(const ProblemParams& problem, const QueryWork& work, int group,
                                       bool may_skip_first)
      : tiles(work.keys) {
    if constexpr (kSkipsTiles) {
      const TileRange seen = TileRange::touched(
          mask(problem, work).key_range(first_row(work, group), end_row(problem, work, group)), kBlockK);
      // why at most one on a side: a group passes it while it holds the slot of a v, and the ring is short.
      skips_first = may_skip_first && tiles.count() > 1 && seen.end < tiles.end;
      tiles.end -= skips_first;
      skips_last = tiles.count() > 1 && seen.begin > tiles.begin;
      tiles.begin += skips_last;
    }
  }

  // why apart from the constructor: L31.
  __device__ __forceinline__ void find_clear(const ProblemParams& problem, const QueryWork& work, int group) {
    clear = TileRange::inside(mask(problem, work).full_range(first_row(work, group), end_row(problem, work, group)),
                              kBlockK);
  }

  __device__ __forceinline__ DescendingTiles walk() const { return tiles; }

 private:
  __device__ static Mask mask(const ProblemParams& problem, const QueryWork& work) {
    return Sequence(problem, work.batch).mask();
  }
  __device__ static int first_row(const QueryWork& work, int group) { return work.row_begin + kGroupRows * group; }
  __device__ static int end_row(const ProblemParams& problem, const QueryWork& work, int group) {
    return smaller(first_row(work, group) + kGroupRows, Sequence(problem, work.batch).seqlen_q());
  }
};

// One warp's part of a warpgroup. `i` is the number of its work.
struct Consumer {
  const TiledForwardParams& params;
  const Addresses& smem;
  const int group, warp;  // the consumer's number; the warp's number within it
  const bool leads = threadIdx.x % 32 == 0;
  unsigned i = 0;
  RingPosition ring;
  Query q;
  Scores s;
  Softmax softmax;

  __device__ __forceinline__ Consumer(const TiledForwardParams& p, const Addresses& addresses, int warp_idx)
      : params(p), smem(addresses), group(warp_idx / 4), warp(warp_idx % 4) {}

  // why of batch element 0: all have the same mask. Where they differ, lane_row must read the work's batch element too.
  __device__ __forceinline__ Mask mask() const { return Sequence(params.problem, 0).mask(); }
  __device__ __forceinline__ float scale_log2() const { return params.problem.score.scale_log2; }

  // Waits for a tile of the ring. The result is its address.
  __device__ __forceinline__ unsigned await(const RingPosition& at) const {
    mbarrier_wait(smem.kv_full + 8 * at.slot, at.parity);
    return smem.kv + at.slot * kBytesSlot;
  }

  // Goes on in the ring. The result is the slot that is left.
  __device__ __forceinline__ unsigned advance() {
    const unsigned slot = ring.slot;
    ring.advance();
    return slot;
  }

  // Releases a tile that only products have read. why without __syncwarp: all lanes have waited for these together.
  __device__ __forceinline__ void release(unsigned slot) const {
    if (leads) mbarrier_arrive(smem.kv_empty + 8 * slot);
  }

  __device__ __forceinline__ void skip() {
    await(ring);
    release(advance());
  }

  // The warp's first row in the query block, this lane's first query, and the warp's rows of q.
  __device__ __forceinline__ int block_row() const { return group * kGroupRows + warp * 16; }
  __device__ __forceinline__ int lane_row() const {
    return smem.work(i).row_begin + block_row() + fresh_thread() % 32 / 4;
  }
  __device__ __forceinline__ unsigned q_smem() const { return smem.q_rows(i, group) + warp * 16 * 128; }

  // Begins s = q kᵀ of the ring's next tile. The result is the tile's slot.
  __device__ __forceinline__ unsigned begin_next_scores() {
    begin_scores(s, q, smem.q_rows(i, group), await(ring));
    return advance();
  }

  __device__ __forceinline__ void await_query() {
    mbarrier_wait(smem.q_full(i, group), i / kQStages & 1);
    load_query(q, q_smem());
  }

  // Begins s = q kᵀ of the first key tile that this warpgroup computes.
  __device__ __forceinline__ unsigned begin_first_scores(const GroupKeys& keys) {
    if (keys.skips_first) skip();
    await_query();
    return begin_next_scores();
  }

  // Releases k of key tile n, whose scores are not needed any more, and q after the last tile, or after the first if q
  // is in registers. why not before: L40.
  __device__ __forceinline__ void end_scores(const GroupKeys& keys, int n, unsigned k_slot) const {
    __syncwarp();  // why: as in mbarrier_arrive_warp, because all lanes have loaded q
    release(k_slot);
    if (n == (kQInRegisters ? keys.tiles.end - 1 : keys.tiles.begin) && leads) mbarrier_arrive(smem.q_empty(i, group));
  }

  // Waits until s is there. At most kPending groups of products that were begun later may still run.
  template <int kPending>
  __device__ __forceinline__ void await_scores() {
    wgmma_wait<kPending>();
    wgmma_pin(s);
  }

  // Waits for s of key tile n and makes weights of it, with any mask and maximum. The caller multiplies o by o_scale.
  template <int kPending>
  __device__ __forceinline__ void weigh(const GroupKeys& keys, int n, float (&o_scale)[2]) {
    const int row = lane_row();  // why here: L31
    await_scores<kPending>();
    Score(params.problem.score).apply(s);
    if (n >= keys.clear.end) mask().hide_after(s, row, n * kBlockK, fresh_thread() % 4);
    if (n < keys.clear.begin) mask().hide_before(s, row, n * kBlockK, fresh_thread() % 4);
    softmax.raise(s, scale_log2(), o_scale);
    float sums[2];
    softmax.weigh(s, scale_log2(), sums);
    softmax.add(sums);
  }

  // Stores lse of this lane's rows.
  __device__ __forceinline__ void store_lse(const QueryWork& work, const float (&lse)[2]) const {
    const Sequence sequence(params.problem, work.batch);
    const int lane = fresh_thread() % 32, row = work.row_begin + block_row() + lane / 4;
    float* const rows = params.lse + sequence.lse_offset(work.head);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane % 4 == 0 && row + 8 * h < sequence.seqlen_q()) rows[row + 8 * h] = lse[h];
  }
};

// The body of a kernel whose computing warps run `Computing`.
template <class Computing>
__device__ __forceinline__ void run_roles(const TiledForwardParams& params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const Addresses smem{*reinterpret_cast<const SharedStorage*>(smem_bytes)};
  // why by a shuffle: a warp's number is the same in all its lanes, and the compiler must know.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  // why shared out: nothing is copied before all of this is done, and it is a part of the time of a short call.
  QueryWork first;
  if (warp == 0) first = WorkQueue().work(params);
  if (threadIdx.x == 32) smem.init_barriers();
  if (threadIdx.x == 64) tma_prefetch(&params.q_map), tma_prefetch(&params.k_map);
  if (threadIdx.x == 96 && kHeadDimV > 0) tma_prefetch(&params.v_map), tma_prefetch(&params.out_map);
  __syncthreads();
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) KeyProducer(params, smem).run(first);
    else if (warp <= kQueryWarps) QueryProducer(params, smem, warp - 1).run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Computing(params, smem, warp - 4).run();
  }
}
