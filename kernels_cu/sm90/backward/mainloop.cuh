// The consumers of backward on Hopper: the products of a key block, step after step.
#pragma once
#include "../pipeline/mod_step.cuh"
#include "dq_accumulate.cuh"
#include "epilogue.cuh"

// The order of some parts of a step. Each choice is faster for the tiles that it names, and slower for others (L32).
constexpr bool kFindsStatsFirst = kBlockQ == 64;  // the address of lse is computed before the wait for s (L31)
// dq is passed on after the next s and dp are issued. The wait for their q comes before the wait for dk.
constexpr bool kPassesLate = kDqByRows;

// True if dp is issued only after the mods have computed scores, because their loads need its registers.
constexpr bool kIssuesDpLate = kModsTogether;

using Scores = float[kBlockQ / 2];
using Pairs = unsigned[kBlockQ / 4];
using ModStep = ModStepOf<kHasMods, kBlockQ / 2, true, kNeedsScoreModGrad>;

// True if scores become p beside ds, where their slope is needed.
constexpr bool kExponentiatesLate = Score::kAlwaysChanges || kNeedsScoreModGrad;

struct Consumer : KeyGradients {
  unsigned k[kKSteps + 1][4], v[kVSteps + 1][4];  // left operands; the last one is unused
  // If varlen: query tiles that see all keys of this warpgroup. Reading the mask in each step costs up to 4 % (L5).
  TileRange unmasked;

  using KeyGradients::KeyGradients;

  // Issues x = a bᵀ of this warpgroup's keys with the queries of a tile. The first columns of a are in registers.
  template <int kColumns, int kCount>
  __device__ __forceinline__ void issue_scores(Scores& x, const unsigned (&a)[kCount][4], unsigned a_smem,
                                               unsigned b_smem) const {
    const unsigned long long keys = wgmma_descriptor(a_smem + group * kGroupRows * 128);
    ::issue_abt<kColumns, kCount - 1>(x, a, keys, kPanelBytesK, wgmma_descriptor(b_smem), kPanelBytesQ);
  }

  // Loads the first columns of k or v once they have arrived.
  template <int kCount>
  __device__ __forceinline__ void load_keys(unsigned (&a)[kCount][4], unsigned a_smem, unsigned barrier,
                                            unsigned parity) const {
    if constexpr (kCount > 1) {
      const unsigned from = row_address(a_smem + (group * kGroupRows + warp * 16) * 128);
      mbarrier_wait(barrier, parity);
      load_rows<kCount - 1>(a, from, kPanelBytesK);
    }
  }

  // Loads the first columns of k and v for the first step of a key block, which is step n.
  __device__ __forceinline__ void load_keys(unsigned n) {
    const unsigned slot = n % kStages, parity = n / kStages & 1;
    load_keys(k, smem.k, smem.q_full + 8 * slot, parity);
    load_keys(v, smem.v, smem.dout_full + 8 * slot, parity);
  }

  // Issues dq = dsᵀ k of this warpgroup's columns, or rows.
  template <int kCount>
  __device__ __forceinline__ void issue_dq(float (&dq)[kCount], unsigned ds_smem) const {
    const unsigned k_offset = kDqByRows ? 0 : group * (kDqColumns / kPanelColumns) * kPanelBytesK;
    const unsigned long long k_rows = wgmma_descriptor(smem.k + k_offset, kPanelBytesK);
    const unsigned long long ds_columns = wgmma_descriptor(ds_smem + (kDqByRows ? group * 64 * 128 : 0));
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockK / 16; ++kk) {
      const unsigned long long k = k_rows + wgmma_rows(kk), ds = ds_columns + wgmma_columns(kk, kPanelBytesQ);
      if constexpr (kDqTransposed) Wgmma<kBlockQ>::template ss<kIsFloat16, false, true>(dq, k, ds, kk > 0);
      else Wgmma<kDqColumns>::template ss<kIsFloat16, true>(dq, ds, k, kk > 0);
    }
    wgmma_commit();
  }

  // Issues dqᵀ = kᵀ ds of this warpgroup's queries, panel after panel.
  template <int kCount>
  __device__ __forceinline__ void issue_dq_by_queries(float (&dq)[kCount], unsigned ds_smem) const {
    constexpr int kPart = kDqQueries / 2;
    const unsigned long long k_rows = wgmma_descriptor(smem.k);
    const unsigned long long ds_columns = wgmma_descriptor(ds_smem + group * kDqQueries * 128);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockK / 16; ++kk) {
      const unsigned long long k = k_rows + wgmma_rows(kk), ds = ds_columns + wgmma_columns(kk, kPanelBytesQ);
#pragma unroll
      for (int panel = 0; panel < kDqPanels; ++panel) {
        float (&part)[kPart] = reinterpret_cast<float (&)[kPart]>(dq[panel * kPart]);
        Wgmma<kDqQueries>::template ss<kIsFloat16, false, true>(part, k + panel * (kPanelBytesK / 16), ds, kk > 0);
      }
    }
    wgmma_commit();
  }

  // Issues dk += ds q with ds from shared memory, where its rows are queries.
  __device__ __forceinline__ void issue_dk(unsigned ds_smem, unsigned q_smem) {
    const unsigned long long ds = wgmma_descriptor(ds_smem), q = wgmma_descriptor(q_smem, kPanelBytesQ);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < kBlockQ / 16; ++kk)
      Wgmma<kHeadDim>::template ss<kIsFloat16, true, true>(dk, ds + wgmma_rows(kk), q + wgmma_rows(kk), true);
    wgmma_commit();
  }

  // Sets masked scores of this warpgroup's keys with the queries of tile m to -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, int m) const {
    if (kVarlen && m >= unmasked.begin && m < unmasked.end) return;
    const int key = block * kBlockK + group * kGroupRows, query = m * kBlockQ;
    const Mask mask = sequence().mask().transposed();
    if (!kVarlen && mask.all_visible<true>({key, key + kGroupRows}, {query, query + kBlockQ})) return;
    const int lane = fresh_thread() % 32;
    mask.apply<true>(s, key + 16 * warp + lane / 4, query, lane % 4);
  }

  // Turns scores into p.
  __device__ __forceinline__ void exponentiate(float (&s)[4], unsigned stats) const {
    const float scale = scale_log2_of(params.problem);
    unsigned lse[2];
    ld_shared_v2(lse[0], lse[1], stats);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2_approx(fmaf(s[i], scale, -__uint_as_float(lse[i % 2])));
  }

  // Turns s and dp into pairs of p and ds. s holds p, or still scores if their slope is needed.
  __device__ __forceinline__ void p_and_ds(const Scores& s, const Scores& dp, unsigned stats, const ModStep& mod_step,
                                           Pairs& weights, Pairs& ds) const {
#pragma unroll
    for (int j = 0; j < kBlockQ / 8; ++j) {
      float x[4], y[4], slope[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = s[4 * j + i];
      mod_step.score(x, slope, j);
      if constexpr (kExponentiatesLate) exponentiate(x, stats + j * 32);
      unsigned delta[2];
      ld_shared_v2(delta[0], delta[1], stats + kBytesStats / 2 + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = x[i] * (mod_step.gradient(dp[4 * j + i], 4 * j + i) - __uint_as_float(delta[i % 2]));
        if constexpr (Score::kAlwaysChanges) y[i] *= Score{params.problem.score}.slope(s[4 * j + i]);
        if constexpr (kScoreModGrad) y[i] *= slope[i];
        y[i] = mod_step.hidden_gradient(y[i], x[i]);
        x[i] = mod_step.weight(x[i], 4 * j + i);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        weights[2 * j + i / 2] = pack2(x[i], x[i + 1]);
        ds[2 * j + i / 2] = pack2(y[i], y[i + 1]);
      }
    }
  }

  // Stores the warp's 16 keys (or columns of dq) by some queries to a panel whose rows are these queries.
  template <int kQueries>
  __device__ __forceinline__ void store_transposed(const unsigned* x, unsigned panel) const {
    const int lane = fresh_thread() % 32;
    const unsigned target = panel + Swizzle<8>::offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int kk = 0; kk < kQueries / 16; ++kk) stmatrix_x4_trans(target + kk * 2048, x + 4 * kk);
    if constexpr (kQueries % 16 != 0) {
      const unsigned last = panel + Swizzle<8>::offset(lane % 8, 2 * warp + lane / 8 % 2);
      stmatrix_x2_trans(last + kQueries / 16 * 2048, x + kQueries / 16 * 4);
    }
  }

  // Stages dq as rows of 32 floats, in panels, with zeros for queries that see no key.
  template <int kCount>
  __device__ __forceinline__ void stage_sums(float (&dq)[kCount], int m) const {
    const Range visible = sequence().visible_queries();
    const float scale = params.problem.score.softmax_scale;
    const int lane = fresh_thread() % 32;
    if constexpr (kDqTransposed) {
      constexpr int kPart = kDqQueries / 2;  // of each 64 columns
      constexpr unsigned kPanelBytes = kDqQueries * 128;
      const int begin = m * kBlockQ + (kDqByQueries ? kDqQueries * group : 0);
      const int query = lane % 4 * 2, column = 16 * warp + lane / 4;
      const unsigned panel = smem.dq + group * kBytesDq + column / 32 * kPanelBytes + column % 4 * 4;
      const unsigned first = panel + Swizzle<8>::offset(query, column % 32 / 4);
      const unsigned second = panel + Swizzle<8>::offset(query + 1, column % 32 / 4);
      if (begin < visible.begin || begin + kDqQueries > visible.end) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const int row = begin + query + i % kPart / 4 * 8 + i % 2;
          if (row < visible.begin || row >= visible.end) dq[i] = 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const unsigned at = (i % 2 ? second : first) + i / kPart * 2 * kPanelBytes;
        st_shared_u32(Swizzle<8>::advance(at, i % kPart / 4 * 8, i / 2 % 2 * 2), __float_as_uint(dq[i] * scale));
      }
    } else {
      zero_outside(dq, m * kBlockQ + (kDqByRows ? 64 * group : 0) + 16 * warp + lane / 4, visible);
      stage_rows<kDqColumns, true>(dq, scale, smem.dq + (group * 4 + warp) * (kBytesDq / 4), 2048);
    }
  }

  // Stages dq for DqWarp: as floats or, in the last key block, summed up and in the dtype of q.
  template <int kCount>
  __device__ __forceinline__ void stage_dq(float (&dq)[kCount], unsigned n, int m) const {
    const int lane = fresh_thread() % 32;
    const unsigned warp_offset = (group * 4 + warp) * (kBytesDq / 4), target = smem.dq + warp_offset;
    bar_sync(kDqReady + group, kDqThreads);
    if constexpr (kAccumulates) return stage_sums(dq, m);
    const unsigned mode = ld_shared_u32(smem.dq_modes + 4 * (n & 1));
    if (mode < kDqFinishAlone) {
#pragma unroll
      for (int i = 0; i < kDqFloats; i += 4) {
        st_shared_v4(target + lane * 16 + i * 128, {__float_as_uint(dq[i]), __float_as_uint(dq[i + 1]),
                                                    __float_as_uint(dq[i + 2]), __float_as_uint(dq[i + 3])});
      }
    } else {
      if (mode >= kDqFinish) {
        mbarrier_wait(smem.sum_full, mode - kDqFinish);
#pragma unroll
        for (int i = 0; i < kDqFloats; i += 4) {
          const float4 x = ld_shared_v4_f32(smem.dq_sum + warp_offset + lane * 16 + i * 128);
          dq[i] += x.x, dq[i + 1] += x.y, dq[i + 2] += x.z, dq[i + 3] += x.w;
        }
        if constexpr (!kDqTransposed) {
          fence_proxy_async();
          mbarrier_arrive(smem.sum_empty);  // every lane, for racecheck (L41)
        }
      }
      if constexpr (kDqTransposed) {
        if (mode >= kDqFinish) bar_sync(kDqSumRead + group, 128);
        const float scale = params.problem.score.softmax_scale;
        constexpr int kPart = kDqQueries / 2;  // of each 64 columns
        const int query = m * kBlockQ + (kDqByQueries ? kDqQueries * group : 0) + lane % 4 * 2;
        const Range visible = sequence().visible_queries();
        unsigned rounded[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
          const int first = query + i % kPart / 4 * 8;
          rounded[i / 2] = pack2(first >= visible.begin && first < visible.end ? dq[i] * scale : 0.0f,
                                 first + 1 >= visible.begin && first + 1 < visible.end ? dq[i + 1] * scale : 0.0f);
        }
#pragma unroll
        for (int panel = 0; panel < kDqPanels; ++panel) {
          const unsigned to = smem.dq + group * kBytesDq + panel * kDqQueries * 128;
          store_transposed<kDqQueries>(rounded + panel * kPart / 2, to);
        }
      } else {
        const int row = m * kBlockQ + (kDqByRows ? 64 * group : 0) + 16 * warp + lane / 4;
        zero_outside(dq, row, sequence().visible_queries());
        stage_rows<kDqColumns>(dq, params.problem.score.softmax_scale, target, 2048);
      }
    }
  }

  // Signals to DqWarp that dq is staged.
  __device__ __forceinline__ void pass_dq() const {
    fence_proxy_async();
    bar_arrive(kDqFilled + group, kDqThreads);
  }

  __device__ __forceinline__ void wait_query(unsigned n) const {
    mbarrier_wait(smem.q_full + 8 * (n % kStages), n / kStages & 1);
  }
  // If transposed, the call is late (racecheck, L41): it also signals that the warp is done with dq's shared memory.
  __device__ __forceinline__ void release_query(unsigned n) const {
    mbarrier_arrive_warp(smem.q_empty + 8 * (n % kStages), is_leader);
  }

  // Computes step n: query tile m of a query head. `first`: it is the first step of its key block. last() returns true
  // for the last one. It runs once, beside a product; if block-sparse, it waits and runs beside the first product.
  // is_full: the mask_mod shows all of the tile.
  template <class Last>
  __device__ __forceinline__ void step(unsigned n, int head, int m, bool is_full, bool first, Last last) {
    const unsigned slot = n % kStages, parity = n / kStages & 1;
    const unsigned q_smem = smem.q + slot * kBytesQ, dout_smem = smem.dout + slot * kBytesDout;
    const unsigned ds_smem = smem.ds + n % kDsStages * kBytesDs;
    Scores s, dp;
    if (!kPassesLate || first) wait_query(n);
    issue_scores<kHeadDim>(s, k, smem.k, q_smem);
    const ModStep mod_step(*this, head, block * kBlockK + group * kGroupRows + warp * 16, m * kBlockQ);
    auto issue_dp = [&] {
      mbarrier_wait(smem.dout_full + 8 * slot, parity);
      issue_scores<kHeadDimV>(dp, v, smem.v, dout_smem);
    };
    if constexpr (!kIssuesDpLate) issue_dp();
    if (kPassesLate && !first) pass_dq();
    if (kDqTransposed && n > 0) release_query(n - 1);
    bool is_last;
    if constexpr (kBlockSparse) is_last = last();
    unsigned stats;
    auto find_stats = [&] { stats = smem.stats + slot * kBytesStats + fresh_thread() % 4 * 8; };
    if constexpr (kFindsStatsFirst) find_stats();
    wgmma_wait<kIssuesDpLate ? 0 : 1>(s);
    Score{params.problem.score}.apply(s);
    if (kSkipsFullTiles && is_full) mod_step.template apply<false>(s);
    else mod_step.template apply<kMaskMod>(s);
    apply_mask(s, m);
    if constexpr (kIssuesDpLate) issue_dp();
    if constexpr (!kFindsStatsFirst) find_stats();
    if constexpr (!kExponentiatesLate) {
#pragma unroll
      for (int j = 0; j < kBlockQ / 8; ++j) exponentiate(reinterpret_cast<float (&)[4]>(s[4 * j]), stats + j * 32);
    }
    wgmma_wait<0>(dp);
    Pairs weights, ds;
    p_and_ds(s, dp, stats, mod_step, weights, ds);
    store_transposed<kBlockQ>(ds, ds_smem + group * kPanelBytesQ);
    issue_ab<kBlockQ, kHeadDimV>(dv, weights, dout_smem, kPanelBytesQ);
    fence_proxy_async();  // after dv is issued, as it waits for the stores of ds (L23)
    bar_sync(kDsWritten, kConsumerThreads);
    float dq[kDqFloats];
    if constexpr (kDqByQueries) issue_dq_by_queries(dq, ds_smem);
    else issue_dq(dq, ds_smem);
    wgmma_wait<1>(dv);
    mbarrier_arrive_warp(smem.dout_empty + 8 * slot, is_leader);
    if constexpr (kDqByQueries) issue_dk(ds_smem + group * kPanelBytesQ, q_smem);
    else issue_ab<kBlockQ, kHeadDim>(dk, ds, q_smem, kPanelBytesQ);
    wgmma_wait<1>(dq);
    stage_dq(dq, n, m);
    if constexpr (!kPassesLate) pass_dq();
    if constexpr (!kBlockSparse) is_last = last();
    if (kPassesLate && !is_last) wait_query(n + 1);
    wgmma_wait<0>(dk);
    if constexpr (!kDqTransposed) release_query(n);
  }

  __device__ __forceinline__ void run() {
    unsigned n = 0;
#pragma unroll 1
    while (next_block()) {
      if constexpr (kVarlen) {
        const int key = block * kBlockK + group * kGroupRows;
        unmasked = unmasked_tiles(sequence().mask().transposed(), {key, key + kGroupRows}, kBlockQ);
      }
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      const unsigned first = n;
      if constexpr (kBlockSparse) {
        TileStep next = pop();
        if (!next.is_end()) load_keys(n);
#pragma unroll 1
        for (; !next.is_end(); ++n) {
          const TileStep tile_step = next;
          step(n, tile_step.head, tile_step.tile.n(), tile_step.tile.is_full(), n == first, [&] {
            next = pop();
            return next.is_end();
          });
        }
      } else {
        if (steps.begin < steps.end) load_keys(n);
        const unsigned last = n + (steps.end - steps.begin) - 1;
        for_each_step(n,
                      [&](int head, int m, bool) { step(n, head, m, false, n == first, [&] { return n == last; }); });
      }
      if (kPassesLate && n != first) pass_dq();
      bar_sync(kKeysConsumed + (kLeavesByDq ? group : 0), kKeysThreads);
      if constexpr (kLeavesByDq) mbarrier_arrive_warp(smem.kv_empty, is_leader);
      if constexpr (kAccumulates) add_gradients(params);
      else if (!is_shared() || add_up()) store_gradients(n);
      if constexpr (!kLeavesByDq) mbarrier_arrive_warp(smem.kv_empty, is_leader);
      __syncwarp();
    }
  }
};
