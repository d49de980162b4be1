// What the computing warpgroups of the Hopper kernels share: their tiles, their place in the ring, and scores.
#pragma once
#include "../ptx/warpgroup.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "softmax.cuh"

static_assert(sizeof(TiledParams) == kParamsBytes, "the host packs other parameters");

constexpr int kProducerRegisters = kNumConsumers == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kNumConsumers == 2 ? 240 : 160;

using Scores = float[kBlockK / 2];

// The first columns of a warp's rows of q, as the products take them from registers.
__device__ __forceinline__ void load_query(Query& q, unsigned q_smem) {
  using Panel = Swizzle<8>;
  const int lane = fresh_thread() % 32;
  const unsigned first = q_smem + Panel::offset(lane % 16, lane / 16);
#pragma unroll
  for (int kk = 0; kk < kQSteps; ++kk) {
    ldmatrix_x4(q[kk], Panel::advance(first + kk / 4 * kPanelBytesQ, 0, kk % 4 * 2));
  }
}

// s = q kᵀ, begun. why from registers, as far as they go: from shared memory wgmma reads q again for every key tile, at
// the cost of bandwidth and of power.
__device__ __forceinline__ void begin_scores(Scores& s, const Query& q, unsigned q_smem, unsigned k_smem) {
  const unsigned long long q_begin = wgmma_descriptor(q_smem), k_begin = wgmma_descriptor(k_smem);
  begin_scores<kHeadDim, kQSteps>(s, q, q_begin, kPanelBytesQ, k_begin, kPanelBytesK);
}

// Whether a warpgroup may pass over the first and the last key tile of its block, of which it sees nothing. why: with
// tiles no shorter than the block this is rare, and to ask costs more than it saves.
constexpr bool kSkipsTiles = kBlockQ > kBlockK;

// A block's key tiles as one warpgroup sees them: [begin, end), of which [clear_begin, clear_end) need no mask. One
// more comes before if it skips_first, and after if it skips_last.
struct KeyTiles {
  int begin, end;
  bool skips_first = false, skips_last = false;
  int clear_begin, clear_end;

  // may_skip_first: not after a block whose last key tile was skipped.
  __device__ __forceinline__ KeyTiles(const ForwardParams& params, const Tile& tile, int group, bool may_skip_first)
      : begin(tile.begin), end(tile.end) {
    if constexpr (kSkipsTiles) {
      const KeyRange seen = Mask(params).key_range(first_row(tile, group), end_row(params, tile, group));
      // why: at most one on a side: they are passed while the slot of a v is held, and the ring is short.
      skips_first = may_skip_first && end - begin > 1 && (seen.end + kBlockK - 1) / kBlockK < end;
      end -= skips_first;
      skips_last = end - begin > 1 && seen.begin / kBlockK > begin;
      begin += skips_last;
    }
  }

  // why: apart, because there is time for it once the first products are begun.
  __device__ __forceinline__ void find_clear(const ForwardParams& params, const Tile& tile, int group) {
    const KeyRange full = Mask(params).full_range(first_row(tile, group), end_row(params, tile, group));
    clear_begin = (full.begin + kBlockK - 1) / kBlockK, clear_end = full.end / kBlockK;
  }

 private:
  __device__ static int first_row(const Tile& tile, int group) { return tile.row_begin + kGroupRows * group; }
  __device__ static int end_row(const ForwardParams& params, const Tile& tile, int group) {
    return min(first_row(tile, group) + kGroupRows, params.seqlen_q);
  }
};

// One warp's part of a warpgroup. `i` is the number of its tile.
struct Consumer {
  const TiledParams& params;
  const Addresses& smem;
  const int group, warp;  // of the warpgroups that compute; of the group
  const bool leads = threadIdx.x % 32 == 0;
  unsigned i = 0;
  RingPosition ring;
  Query q;
  Scores s;
  Softmax softmax;

  __device__ __forceinline__ Consumer(const TiledParams& p, const Addresses& addresses, int warp_idx)
      : params(p), smem(addresses), group(warp_idx / 4), warp(warp_idx % 4) {}

  // Waits for a tile of the ring; its address.
  __device__ __forceinline__ unsigned await(const RingPosition& at) const {
    mbarrier_wait(smem.kv_full + 8 * at.slot, at.parity);
    return smem.kv + at.slot * kBytesSlot;
  }

  // Goes on in the ring; the slot left.
  __device__ __forceinline__ unsigned advance() {
    const unsigned slot = ring.slot;
    ring.advance();
    return slot;
  }

  // Of a tile that products alone have read: to wait for them brings the warp in step.
  __device__ __forceinline__ void release(unsigned slot) const {
    if (leads) mbarrier_arrive(smem.kv_empty + 8 * slot);
  }

  __device__ __forceinline__ void skip() {
    await(ring);
    release(advance());
  }

  // The warp's first row in the query block, this lane's first of all queries, and the warp's rows of q.
  __device__ __forceinline__ int block_row() const { return group * kGroupRows + warp * 16; }
  __device__ __forceinline__ int lane_row() const {
    return smem.tile(i).row_begin + block_row() + fresh_thread() % 32 / 4;
  }
  __device__ __forceinline__ unsigned q_smem() const { return smem.q_rows(i, group) + warp * 16 * 128; }

  // s = q kᵀ of the ring's next tile, begun; its slot.
  __device__ __forceinline__ unsigned begin_next_scores() {
    begin_scores(s, q, smem.q_rows(i, group), await(ring));
    return advance();
  }

  __device__ __forceinline__ void await_query() {
    mbarrier_wait(smem.q_full(i, group), i / kQStages & 1);
    load_query(q, q_smem());
  }

  // The same of the first key tile that this warpgroup sees.
  __device__ __forceinline__ unsigned begin_first_scores(const KeyTiles& keys) {
    if (keys.skips_first) skip();
    await_query();
    return begin_next_scores();
  }

  // The scores of key tile n are not needed any more. q is not after the last; nor after the first, if it is in
  // registers. why not before: loads that are still on their way do not hold back an arrival.
  __device__ __forceinline__ void end_scores(const KeyTiles& keys, int n, unsigned k_slot) const {
    __syncwarp();  // as in mbarrier_arrive_warp: lanes have loaded q
    release(k_slot);
    if (n == (kQInRegisters ? keys.end - 1 : keys.begin)) {
      if (leads) mbarrier_arrive(smem.q_empty(i, group));
    }
  }

  // Until s is there; at most kPending later groups of products are not.
  template <int kPending>
  __device__ __forceinline__ void await_scores() {
    wgmma_wait<kPending>();
    wgmma_pin(s);
  }

  // s, of key tile n, is awaited and becomes weights, whatever it takes; o and the sums so far are to be multiplied by
  // o_scale.
  template <int kPending>
  __device__ __forceinline__ void weigh(const KeyTiles& keys, int n, float (&o_scale)[2]) {
    const ForwardParams& forward = params.forward;
    const int row = lane_row();  // why: read while the products run
    await_scores<kPending>();
    if constexpr (kSoftcap) cap(s, forward.softcap_scale);
    if (n >= keys.clear_end) Mask(forward).hide_after(s, row, n * kBlockK, fresh_thread() % 4);
    if (n < keys.clear_begin) Mask(forward).hide_before(s, row, n * kBlockK, fresh_thread() % 4);
    softmax.raise(s, forward.scale_log2, o_scale);
    float sums[2];
    softmax.weigh(s, forward.scale_log2, sums);
    softmax.add(sums);
  }

  // lse of this lane's rows of a tile.
  __device__ __forceinline__ void store_lse(const Tile& of, const float (&lse)[2]) const {
    const ForwardParams& forward = params.forward;
    const int lane = fresh_thread() % 32, row = of.row_begin + block_row() + lane / 4;
    float* const rows = forward.lse + (static_cast<long long>(of.batch) * forward.heads_q + of.head) * forward.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (lane % 4 == 0 && row + 8 * h < forward.seqlen_q) rows[row + 8 * h] = lse[h];
    }
  }
};

// The entry of a kernel whose computing warps run `Computing`.
template <class Computing>
__device__ __forceinline__ void run_roles(const TiledParams& params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const Addresses smem(*reinterpret_cast<const SharedStorage*>(smem_bytes));
  // why: a warp's number is the same for all its lanes, and the compiler must know.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  // why shared out: nothing is copied before all of this is done, and of a short call it is a part.
  Tile first;
  if (warp == 0) first = Schedule().tile(params);
  if (threadIdx.x == 32) smem.init_barriers();
  if (threadIdx.x == 64) tma_prefetch(&params.q), tma_prefetch(&params.k);
  if (threadIdx.x == 96 && kHeadDimV > 0) tma_prefetch(&params.v), tma_prefetch(&params.out);
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
