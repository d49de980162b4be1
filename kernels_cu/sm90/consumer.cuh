// What the consumers of forward and lse on Hopper share: their key tiles, their place in the ring, and their scores.
#pragma once
#include "../common/score.cuh"
#include "../ptx/grid.cuh"
#include "../ptx/warpgroup.cuh"
#include "tile_mods.cuh"
#include "producer.cuh"
#include "products.cuh"
#include "softmax.cuh"

using Scores = float[kBlockK / 2];

// Begins s = q kᵀ. why q from registers as far as it is there: L20.
__device__ __forceinline__ void issue_qk(Scores& s, const Query& q, unsigned q_smem, unsigned k_smem) {
  const unsigned long long q_begin = wgmma_descriptor(q_smem), k_begin = wgmma_descriptor(k_smem);
  issue_abt<kHeadDim, kQSteps>(s, q, q_begin, kPanelBytesQ, k_begin, kPanelBytesK);
}

// Whether a warpgroup may pass over the first and the last key tile, if it sees nothing of them. why not always: L33.
constexpr bool kSkipsTiles = kBlockQ > kBlockK && !kBlockSparse;

// The key tiles of a query block as one warpgroup sees them. The ring holds one more before them if the group
// skips_first, and one after them if it skips_last.
struct GroupKeys {
  TileRange tiles;  // those that the group computes
  bool skips_first = false, skips_last = false;
  TileRange unmasked;  // those that need no mask; if block-sparse, among all tiles and not the visible ones
  int last_common;     // the tile of the last key that all rows see, if there is one

  // why from this work alone: v of a tile that is not skipped may hold NaN, and the bits of a row must not differ
  // between two runs, in which other work comes before.
  __device__ __forceinline__ GroupKeys(const ProblemParams& problem, const QueryWork& work, int group)
      : tiles(work.keys) {
    if constexpr (kSkipsTiles) {
      const Range rows = group_rows(problem, work, group);
      const Range keys = work.sequence(problem).mask().key_range(rows.begin, rows.end);
      const TileRange visible = TileRange::touched(keys, kBlockK);
      // why at most one on a side: a group passes it while it holds the slot of a v, and the ring is short.
      skips_first = tiles.count() > 1 && visible.end < tiles.end;
      tiles.end -= skips_first;
      skips_last = tiles.count() > 1 && visible.begin > tiles.begin;
      tiles.begin += skips_last;
    }
  }

  // why apart from the constructor: L31.
  __device__ __forceinline__ void find_unmasked(const ProblemParams& problem, const QueryWork& work, int group) {
    const Range rows = group_rows(problem, work, group);
    const Range common = work.sequence(problem).mask().full_range(rows.begin, rows.end);
    unmasked = TileRange::inside(common, kBlockK);
    if constexpr (!kAlwaysUpdatesMax) {
      last_common = (common.end - 1) / kBlockK;
      unmasked.begin =
          const_max(unmasked.begin, tiles.begin);  // why here: a loop that ends there would find it in every turn
    }
  }

 private:
  __device__ static Range group_rows(const ProblemParams& problem, const QueryWork& work, int group) {
    const int begin = kGroupRows * group;
    const Range queries = work.queries(problem, begin, begin + kGroupRows);
    return {queries.begin, const_min(queries.end, work.sequence(problem).seqlen_q())};
  }
};

// One warp's part of a warpgroup. `i` is the number of its work.
struct Consumer : Role {
  const int group, warp;  // the consumer's number; the warp's number within it
  unsigned i = 0;
  PipelineState ring;
  Query q;
  Scores s;
  Softmax softmax;

  __device__ __forceinline__ Consumer(const Role& role, int warp_idx)
      : Role(role), group(warp_idx / 4), warp(warp_idx % 4) {}

  __device__ __forceinline__ float scale_log2() const { return scale_log2_of(params.problem); }

  // Waits for a tile of the ring. The result is its address.
  __device__ __forceinline__ unsigned wait(const PipelineState& at) const {
    mbarrier_wait(smem.kv_full + 8 * at.slot, at.parity);
    return smem.kv + at.slot * kBytesSlot;
  }

  // Releases a tile that only products have read. why without __syncwarp: all lanes have waited for these together.
  __device__ __forceinline__ void release(unsigned slot) const {
    if (is_leader) mbarrier_arrive(smem.kv_empty + 8 * slot);
  }

  __device__ __forceinline__ void release_query() const {
    if (kLanesOfQ > 1 || is_leader) mbarrier_arrive(smem.q_empty(i, group));
  }

  __device__ __forceinline__ void skip() {
    wait(ring);
    release(ring.advance().slot);
  }

  // The warp's first row in the query block, this lane's queries, the mask, and the warp's rows of q.
  __device__ __forceinline__ int block_row() const { return group * kGroupRows + warp * 16; }
  __device__ __forceinline__ auto lane_queries(const QueryWork& work) const {
    return work.lane_queries(params.problem, block_row() + fresh_thread() % 32 / 4);
  }
  __device__ __forceinline__ Mask mask(const QueryWork& work) const { return work.sequence(params.problem).mask(); }
  __device__ __forceinline__ MissingPages missing_pages(unsigned k_slot) const { return {params, smem, k_slot}; }
  __device__ __forceinline__ unsigned q_smem() const { return smem.q_rows(i, group) + warp * 16 * 128; }

  // Begins s = q kᵀ of the ring's next tile. The result is the tile's slot.
  __device__ __forceinline__ unsigned issue_next_qk() {
    issue_qk(s, q, smem.q_rows(i, group), wait(ring));
    return ring.advance().slot;
  }

  __device__ __forceinline__ void wait_query() {
    mbarrier_wait(smem.q_full(i, group), i / kQStages & 1);
    load_rows<kQSteps>(q, row_address(q_smem()), kPanelBytesQ);
  }

  // Begins s = q kᵀ of the first key tile that this warpgroup computes.
  __device__ __forceinline__ unsigned issue_first_qk(const GroupKeys& keys) {
    if (keys.skips_first) skip();
    wait_query();
    return issue_next_qk();
  }

  // Releases k of key tile n, whose scores are not needed any more, and q after the last tile, or after the first if q
  // is in registers. why not before: L40.
  __device__ __forceinline__ void release_k(const GroupKeys& keys, int n, unsigned k_slot) const {
    __syncwarp();  // why: as in mbarrier_arrive_warp, because all lanes have loaded q
    release(k_slot);
    if (n == (kQInRegisters ? keys.tiles.end - 1 : keys.tiles.begin)) release_query();
  }

  // Waits for s of key tile number n and makes weights of it, with any mask and maximum. The caller multiplies o by
  // o_scale. At most kPending groups of products that were begun later may still run.
  template <int kPending>
  __device__ __forceinline__ void softmax_tile(const GroupKeys& keys, int n, unsigned k_slot, float (&o_scale)[2]) {
    const QueryWork work = smem.work(i);  // why here: L31
    const auto rows = lane_queries(work);
    const auto at = smem.tile(n, k_slot);
    const int tile = at.n();
    const TileMods tile_mods(params, work);
    const auto mod_tile = tile_mods.tile(rows, tile * kBlockK);
    wgmma_wait<kPending>(s);
    Score{params.problem.score}.apply(s);
    tile_mods.apply(mod_tile, s, at.is_full(group));
    if (tile >= keys.unmasked.end) {
      mask(work).apply_end(s, rows, tile * kBlockK, fresh_thread() % 4);
      // why asked of the warp's first row, which sees the fewest of these keys: for one row each lane takes 1 % of a
      // step.
      const auto first = work.lane_queries(params.problem, block_row());
      if (kPacksLimits || mask(work).end(first[0]) < tile * kBlockK + kFewKeys)
        softmax.begin_with_few(rows, mask(work));
    }
    if (tile < keys.unmasked.begin) mask(work).apply_begin(s, rows, tile * kBlockK, fresh_thread() % 4);
    missing_pages(k_slot).apply(s, fresh_thread() % 4);
    softmax.update_max(s, scale_log2(), o_scale);
    float sums[2];
    softmax.exponentiate(s, scale_log2(), sums);
    softmax.add(sums);
  }

  // Gives the factors that turn this lane's rows of the output into the result, and their lse. Those of rows that see
  // nothing are 0. Rows that no sequence uses see nothing, not even a sink.
  __device__ __forceinline__ void finish(const QueryWork& work, const Softmax& softmax, float (&o_scale)[2],
                                         float (&lse)[2]) const {
    const auto rows = lane_queries(work);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      softmax.finish(h, o_scale[h], lse[h]);
      TileMods(params, work).finish(o_scale[h], lse[h]);
      if (kVarlen && rows[h] >= work.sequence(params.problem).seqlen_q()) o_scale[h] = 0.0f, lse[h] = -infinity();
    }
  }

  // Stores lse of this lane's rows.
  __device__ __forceinline__ void store_lse(const QueryWork& work, const float (&lse)[2]) const {
    const auto sequence = work.sequence(params.problem);
    const int lane = fresh_thread() % 32, row = work.row_begin + block_row() + lane / 4;
    float* const rows = params.lse + sequence.lse_offset(work.head);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (lane % 4 == 0 && row + 8 * h < sequence.written_end()) rows[row + 8 * h] = lse[h];
  }
};

template <class Params>
__device__ __forceinline__ void prefetch_query_map(const Params& p) {
  tma_prefetch(&p.q_map);
}
template <class Params>
__device__ __forceinline__ void prefetch_out_map(const Params& p) {
  tma_prefetch(&p.out_map);
}
__device__ __forceinline__ void prefetch_query_map(const WithMods<DecodeParams>&) {}
__device__ __forceinline__ void prefetch_out_map(const WithMods<DecodeParams>&) {}

// The warps that compute make zeros of all rows of q, of which the work may fill a part. why: weights of other rows
// could leave the range (sm90/softmax.cuh).
__device__ __forceinline__ void zero_queries(const Addresses& smem) {
  for (unsigned at = threadIdx.x % 128 * 16; at < kBytesQ; at += 128 * 16) st_shared_v4(smem.q + at, {0, 0, 0, 0});
  fence_proxy_async();
}

// Reads a word of every 64 bytes of the parameters. why: each line comes from memory once a launch, and the warp that
// schedules work would wait for one after the other.
__device__ __forceinline__ void touch(const KernelParams& params) {
  const int* const words = reinterpret_cast<const int*>(&params);
#pragma unroll
  for (unsigned at = 0; at < sizeof(KernelParams) / 4; at += 16) asm volatile("" ::"r"(words[at]));
}

// Brings the lengths to the L2 cache. why: the scheduler warp reads those of keys after those of queries.
__device__ __forceinline__ void fetch_lengths(const ProblemParams& p) {
  const int at = threadIdx.x % 32 * 32;
  auto fetch = [&](const int* lengths) {
    if (lengths != nullptr && at < p.batch) asm volatile("prefetch.global.L2 [%0];" ::"l"(lengths + at));
  };
  fetch(p.cu_seqlens_k), fetch(p.seqused_q), fetch(p.seqused_k);
}

// The body of a kernel whose computing warps run `Computing`.
template <class Computing>
__device__ __forceinline__ void run_roles(const KernelParams& params) {
  using Scheduler = typename Computing::Scheduler;
  extern __shared__ __align__(1024) char smem_bytes[];
  const Addresses smem{*reinterpret_cast<const SharedStorage*>(smem_bytes)};
  // why by a shuffle: a warp's number is the same in all its lanes, and the compiler must know.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (kDecode) launch_next_kernel();
  // why one warp: the others read nothing of what the kernels ahead wrote before the threads of the block have met.
  if (kDecode && !kOneTilePerBlock && warp == kSchedulerWarp) wait_kernels_ahead();
  // why shared out: nothing is copied before all of this is done, and it is a part of the time of a short call.
  QueryWork first;
  if constexpr (kVarlen) {
    if (warp < 4 && kSetsRegisters) setmaxnreg_dec<kProducerRegisters>();
    if (warp == kSchedulerWarp) return SchedulerWarp<Scheduler>{{params, smem}}.run();
  } else {
    if (warp == kSchedulerWarp) first = Scheduler().work(params);  // why a scheduler of its own: L53
  }
  if (threadIdx.x == 32) smem.init_barriers();
  if constexpr (kVarlen) {
    if (warp == 1) __syncwarp(), bar_arrive(kBarriersMade, 64);
  }
  if (threadIdx.x == 64) tma_prefetch(&params.k_map), prefetch_query_map(params);
  if (threadIdx.x == (kVarlen ? 64 : 96) && kHeadDimV > 0) tma_prefetch(&params.v_map), prefetch_out_map(params);
  if (kVarlen && warp == 7) touch(params);
  if (kVarlen && !kDecode && warp == 6) fetch_lengths(params.problem);
  if (kDecode && !kWarpsSplitKeys && warp >= 4) zero_queries(smem);
  if constexpr (kVarlen) bar_sync(kFirstWork, kNumThreads);
  else __syncthreads();
  if (warp < 4) {
    // why these alone: what the warps that compute store follows from what these have loaded.
    if (kOneTilePerBlock) wait_kernels_ahead();
    if constexpr (!kVarlen) {
      setmaxnreg_dec<kProducerRegisters>();
      if (warp == 0) DenseKeyProducer<QueryWork>{{{params, smem}}}.run(first);
      else if (warp <= kQueryWarps) QueryProducer{{params, smem}, warp - 1, kQueryWarps}.run();
      else if (kBlockSparse && warp == kSchedulerWarp) DenseSchedulerWarp<QueryWork>{{{params, smem}}}.run(first);
    } else {
      if (warp == 0) produce_keys<QueryWork>(params, smem, 0);
      else if (warp <= kQueryWarps) QueryProducer{{params, smem}, warp - 1, kQueryWarps}.run();
      else if (warp == 2 && kPaged && kPanelsV > 0) produce_keys<QueryWork>(params, smem, 1);
    }
  } else {
    if (kSetsRegisters) setmaxnreg_inc<kConsumerRegisters>();
    if (kOneTilePerBlock && kHasMods) wait_kernels_ahead();  // why: they may still write to captured arrays
    Computing({params, smem}, warp - 4).run();
  }
}
