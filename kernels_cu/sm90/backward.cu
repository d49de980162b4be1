// Backward on Hopper (FlashAttention-2, arXiv 2307.08691, algorithm 2): dk and dv of blocks of keys over the queries
// that see them, and their share of dq.
//
//   s = k qᵀ, dp = v doutᵀ    wgmma, transposed: rows are keys, so that p and ds are left operands in registers
//   p = exp2(s c - lse)       ds = p (dp - delta)
//   dv += p dout, dk += ds q  wgmma, p and ds from registers
//   dq += dsᵀ k               wgmma, ds through shared memory; added up over the key blocks: gradient_dq.cuh
//
// Roles    warpgroup 0: warp 0 copies q, dout, k, v; warps 2 and 3 take dq to global memory; warp 1 their turns there
//          the others: 64 keys of the block each, all queries. A step is a tile of queries:
//          s, dp | p, ds | dv | (both have written ds) | dq | dk, dq to shared memory beside it
// Barriers q_full, dout_full    has arrived, the first of a block with k, or v    …_empty    every warp is done with it
//          kv_empty   dk and dv, which leave from where k and v were, have left
//          turn_full, turn_empty   the mode of a step's dq is there / read    dq_empty   dq's tile has been read
//          sum_full, sum_empty     what others have added to a tile is there / read
//          kDsBarrier, kDqReadyBarrier, kDqFilledBarrier, kKvBarrier: gradient.cuh
#include "gradient_dq.cuh"
#include "gradient_shared.cuh"

// What is begun before what, by tile: each is faster where it is and slower elsewhere (kernels_cu/TUNING.md).
constexpr bool kFindsStatsFirst = kBlockQ == 64;  // where lse is, before s is waited for
constexpr bool kPassesLate = kDqByRows;           // dq handed on behind the next s and dp; their q waited for before dk

using Scores = float[kBlockQ / 2];
using Pairs = unsigned[kBlockQ / 4];

// One warp, all lanes in step; the first one acts.
struct Loader : Role {
  using Role::Role;

  template <int kPanels>
  __device__ __forceinline__ void load(const TensorMap& map, unsigned target, unsigned panel_bytes, unsigned barrier,
                                       int row, int head) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      tma_load_4d(target + panel * panel_bytes, &map, barrier, panel * kPanelColumns, row, head, batch);
    }
  }

  // Until the key block before has left. why it says so: without any step nothing else keeps the warpgroups from
  // leaving once more meanwhile, and the wait would be for a phase that may never end.
  __device__ __forceinline__ void wait_for_kv(unsigned parity) const {
    mbarrier_wait(smem.kv_empty, parity);
    __syncwarp();
    bar_arrive(kKvBarrier, kKvThreads);
  }

  __device__ __forceinline__ void run() {
    const BackwardParams& p = params.backward;
    unsigned step = 0, kv_parity = 1;
#pragma unroll 1
    for (; enter(); kv_parity ^= 1) {
      const unsigned first_step = step;
      for_each_step(step, [&](int head, int m) {
        const unsigned slot = step % kStages, empty = (step / kStages + 1) & 1;
        const unsigned q_full = smem.q_full + 8 * slot, dout_full = smem.dout_full + 8 * slot;
        const bool first = step == first_step;
        const int row = m * kBlockQ, key = block * kBlockK - p.key_begin;
        const unsigned stats = smem.stats + slot * kBytesStats;
        const float* const lse = reinterpret_cast<const float*>(p.stats) +
                                 (static_cast<long long>(batch) * p.heads_q + head) * 2 * p.stats_rows + row;
        mbarrier_wait(smem.q_empty + 8 * slot, empty);
        if (leads) {
          mbarrier_arrive_expect_tx(q_full, kBytesQ + kBytesStats / 2 + (first ? kBytesK : 0));
          load<kPanelsQk>(params.q, smem.q + slot * kBytesQ, kPanelBytesQ, q_full, row - p.row_begin, head);
          bulk_load(stats, lse, kBytesStats / 2, q_full);
        }
        __syncwarp();
        if (first) {
          wait_for_kv(kv_parity);
          if (leads) load<kPanelsQk>(params.k, smem.k, kPanelBytesK, q_full, key, kv_head);
          __syncwarp();
        }
        mbarrier_wait(smem.dout_empty + 8 * slot, empty);
        if (leads) {
          mbarrier_arrive_expect_tx(dout_full, kBytesDout + kBytesStats / 2 + (first ? kBytesV : 0));
          if (first) load<kPanelsV>(params.v, smem.v, kPanelBytesK, dout_full, key, kv_head);
          load<kPanelsV>(params.dout, smem.dout + slot * kBytesDout, kPanelBytesQ, dout_full, row - p.row_begin, head);
          bulk_load(stats + kBytesStats / 2, lse + p.stats_rows, kBytesStats / 2, dout_full);
        }
        __syncwarp();
      });
      if (step == first_step) wait_for_kv(kv_parity);
    }
  }
};

struct Consumer : Role {
  const int group, warp;  // of the warpgroups that compute; of the group
  float dk[kHeadDim / 2], dv[kHeadDimV / 2];
  unsigned k[kKSteps + 1][4], v[kVSteps + 1][4];  // left operands; the last one is none

  __device__ __forceinline__ Consumer(const TiledBackwardParams& p, const Addresses& addresses, int warp_idx)
      : Role(p, addresses), group(warp_idx / 4), warp(warp_idx % 4) {}

  // x = a bᵀ, begun: this warpgroup's keys with the queries of a tile. The first columns of a are in registers.
  template <int kColumns, int kCount>
  __device__ __forceinline__ void begin_scores(Scores& x, const unsigned (&a)[kCount][4], unsigned a_smem,
                                               unsigned b_smem) const {
    const unsigned long long keys = wgmma_descriptor(a_smem + group * kGroupKeys * 128);
    ::begin_scores<kColumns, kCount - 1>(x, a, keys, kPanelBytesK, wgmma_descriptor(b_smem), kPanelBytesQ);
  }

  // The first columns of k or v once they have come.
  template <int kCount>
  __device__ __forceinline__ void load_keys(unsigned (&a)[kCount][4], unsigned a_smem, unsigned barrier,
                                            unsigned parity) const {
    if constexpr (kCount > 1) {
      const int lane = fresh_thread() % 32;
      const unsigned from = a_smem + (group * kGroupKeys + warp * 16) * 128 + Swizzle<8>::offset(lane % 16, lane / 16);
      mbarrier_wait(barrier, parity);
#pragma unroll
      for (int kk = 0; kk + 1 < kCount; ++kk) {
        ldmatrix_x4(a[kk], Swizzle<8>::advance(from + kk / 4 * kPanelBytesK, 0, kk % 4 * 2));
      }
    }
  }

  // dq = dsᵀ k, begun: this warpgroup's columns, or rows.
  template <int kCount>
  __device__ __forceinline__ void begin_dq(float (&dq)[kCount], unsigned ds_smem) const {
    if constexpr (kDqTransposed) {
      const unsigned long long k = wgmma_descriptor(smem.k + group * kPanelBytesK, kPanelBytesK);
      const unsigned long long ds = wgmma_descriptor(ds_smem);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < kBlockK / 16; ++kk) {
        Wgmma<kBlockQ>::template ss<kIsFloat16, false, true>(dq, k + wgmma_rows(kk),
                                                             ds + wgmma_columns(kk, kPanelBytesQ), kk > 0);
      }
      wgmma_commit();
    } else {
      const unsigned long long a = wgmma_descriptor(ds_smem + (kDqByRows ? group * 64 * 128 : 0));
      const unsigned own = kDqByRows ? 0 : group * (kDqColumns / kPanelColumns) * kPanelBytesK;
      const unsigned long long b = wgmma_descriptor(smem.k + own, kPanelBytesK);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < kBlockK / 16; ++kk) {
        Wgmma<kDqColumns>::template ss<kIsFloat16, true>(dq, a + wgmma_columns(kk, kPanelBytesQ), b + wgmma_rows(kk),
                                                         kk > 0);
      }
      wgmma_commit();
    }
  }

  // Scores that are not seen, of keys from `key` on with queries from `query` on, become -inf.
  __device__ __forceinline__ void hide(Scores& s, int key, int query) const {
    const BackwardParams& p = params.backward;
    const Mask mask = Mask(p).transposed();
    const KeyRange full = mask.full_range(key, key + kGroupKeys);
    if (query >= full.begin && query + kBlockQ <= full.end && key + kGroupKeys <= p.seqlen_k) return;
    const int lane = fresh_thread() % 32;
    mask.apply<true>(s, key + 16 * warp + lane / 4, query, lane % 4);
  }

  // p of scores, capped ones with kSoftcap.
  __device__ __forceinline__ void exponentiate(float (&s)[4], unsigned stats) const {
    const float scale = params.backward.scale_log2;
    unsigned lse[2];
    ld_shared_v2(lse[0], lse[1], stats);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = exp2_approx(fmaf(s[i], scale, -__uint_as_float(lse[i % 2])));
  }

  // s, which are p (with kSoftcap capped scores), and dp become pairs of p and ds.
  __device__ __forceinline__ void weigh(const Scores& s, const Scores& dp, unsigned stats, Pairs& weights,
                                        Pairs& ds) const {
#pragma unroll
    for (int j = 0; j < kBlockQ / 8; ++j) {
      float x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = s[4 * j + i];
      if constexpr (kSoftcap) exponentiate(x, stats + j * 32);
      unsigned delta[2];
      ld_shared_v2(delta[0], delta[1], stats + kBytesStats / 2 + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[i] = x[i] * (dp[4 * j + i] - __uint_as_float(delta[i % 2]));
        if constexpr (kSoftcap) y[i] *= softcap_slope(s[4 * j + i]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        weights[2 * j + i / 2] = pack2(x[i], x[i + 1]);
        ds[2 * j + i / 2] = pack2(y[i], y[i + 1]);
      }
    }
  }

  // The warp's 16 keys (or columns of dq) x all queries to a panel whose rows are queries.
  __device__ __forceinline__ void store_transposed(const Pairs& x, unsigned panel) const {
    const int lane = fresh_thread() % 32;
    const unsigned target = panel + Swizzle<8>::offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int kk = 0; kk < kBlockQ / 16; ++kk) stmatrix_x4_trans(target + kk * 2048, x + 4 * kk);
  }

  // dq to where it is taken to global memory from: as it is or, with the last block, whole and in the dtype of q.
  template <int kCount>
  __device__ __forceinline__ void stage_dq(float (&dq)[kCount], unsigned n, int m) const {
    const int lane = fresh_thread() % 32;
    const unsigned own = (group * 4 + warp) * (kBytesDq / 4), target = smem.dq + own;
    bar_sync(kDqReadyBarrier + group, kDqThreads);
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
          const float4 x = ld_shared_v4_f32(smem.dq_sum + own + lane * 16 + i * 128);
          dq[i] += x.x, dq[i + 1] += x.y, dq[i + 2] += x.z, dq[i + 3] += x.w;
        }
        if constexpr (!kDqTransposed) {
          fence_proxy_async();
          mbarrier_arrive(smem.sum_empty);  // why every lane: for its own reads; seldom enough
        }
      }
      if constexpr (kDqTransposed) {
        if (mode >= kDqFinish) bar_sync(kDqSumBarrier + group, 128);
        const float scale = params.backward.softmax_scale;
        const int query = m * kBlockQ + lane % 4 * 2, begin = params.backward.row_begin, end = params.backward.row_end;
        unsigned rounded[kCount / 2];
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
          const int first = query + i / 4 * 8;
          rounded[i / 2] = pack2(first >= begin && first < end ? dq[i] * scale : 0.0f,
                                 first + 1 >= begin && first + 1 < end ? dq[i + 1] * scale : 0.0f);
        }
        store_transposed(rounded, smem.dq + group * kBytesDq);
      } else {
        const int row = m * kBlockQ + (kDqByRows ? 64 * group : 0) + 16 * warp + lane / 4;
        clear_outside(dq, row, params.backward.row_begin, params.backward.row_end);
        store_rows<kDqColumns>(dq, params.backward.softmax_scale, target, 2048);
      }
    }
  }

  // What was staged is there.
  __device__ __forceinline__ void pass_dq() const {
    fence_proxy_async();
    bar_arrive(kDqFilledBarrier + group, kDqThreads);
  }

  __device__ __forceinline__ void await_query(unsigned n) const {
    mbarrier_wait(smem.q_full + 8 * (n % kStages), n / kStages & 1);
  }

  // why late if transposed: it also tells that the warp is done with the place of dq.
  __device__ __forceinline__ void release_query(unsigned n) const {
    mbarrier_arrive_warp(smem.q_empty + 8 * (n % kStages), leads);
  }

  // first, last: of its key block.
  __device__ __forceinline__ void step(unsigned n, int m, bool first, bool last) {
    const unsigned slot = n % kStages, parity = n / kStages & 1;
    const unsigned q_smem = smem.q + slot * kBytesQ, dout_smem = smem.dout + slot * kBytesDout;
    const unsigned ds_smem = smem.ds + n % kDsStages * kBytesDs;
    Scores s, dp;
    if (!kPassesLate || first) await_query(n);
    begin_scores<kHeadDim>(s, k, smem.k, q_smem);
    mbarrier_wait(smem.dout_full + 8 * slot, parity);
    begin_scores<kHeadDimV>(dp, v, smem.v, dout_smem);
    if (kPassesLate && !first) pass_dq();
    if (kDqTransposed && n > 0) release_query(n - 1);
    unsigned stats;
    auto find_stats = [&] { stats = smem.stats + slot * kBytesStats + fresh_thread() % 4 * 8; };
    if constexpr (kFindsStatsFirst) find_stats();
    wgmma_wait<1>();
    wgmma_pin(s);
    if constexpr (kSoftcap) cap(s, params.backward.softcap_scale);
    hide(s, block * kBlockK + group * kGroupKeys, m * kBlockQ);
    if constexpr (!kFindsStatsFirst) find_stats();
    if constexpr (!kSoftcap) {
#pragma unroll
      for (int j = 0; j < kBlockQ / 8; ++j) exponentiate(reinterpret_cast<float (&)[4]>(s[4 * j]), stats + j * 32);
    }
    wgmma_wait<0>();
    wgmma_pin(dp);
    Pairs weights, ds;
    weigh(s, dp, stats, weights, ds);
    store_transposed(ds, ds_smem + group * kPanelBytesQ);
    begin_sum<kBlockQ, kHeadDimV>(dv, weights, dout_smem, kPanelBytesQ);
    fence_proxy_async();  // why not before: it waits until ds is there
    bar_sync(kDsBarrier, 256);
    float dq[kDqFloats];
    begin_dq(dq, ds_smem);
    wgmma_wait<1>();
    wgmma_pin(dv);
    mbarrier_arrive_warp(smem.dout_empty + 8 * slot, leads);
    begin_sum<kBlockQ, kHeadDim>(dk, ds, q_smem, kPanelBytesQ);
    wgmma_wait<1>();
    wgmma_pin(dq);
    stage_dq(dq, n, m);
    if constexpr (!kPassesLate) pass_dq();
    else if (!last) await_query(n + 1);
    wgmma_wait<0>();
    wgmma_pin(dk);
    if constexpr (!kDqTransposed) release_query(n);
  }

  // The warp's rows of dk or dv, from where k or v was.
  template <int kColumns>
  __device__ __forceinline__ void store(const TensorMap& map, float (&x)[kColumns / 2], float scale,
                                        unsigned target) const {
    const BackwardParams& p = params.backward;
    const int row = group * kGroupKeys + warp * 16;
    clear_outside(x, block * kBlockK + row + fresh_thread() % 32 / 4, p.key_begin, p.key_end);
    target += row * 128;
    store_rows<kColumns>(x, scale, target, kPanelBytesK);
    fence_proxy_async();
    __syncwarp();
    if (leads) {
#pragma unroll
      for (int panel = 0; panel < (kColumns + 63) / 64; ++panel) {
        tma_store_4d(&map, target + panel * kPanelBytesK, panel * kPanelColumns, block * kBlockK + row, kv_head, batch);
      }
      bulk_commit();
    }
  }

  __device__ __forceinline__ void run() {
    unsigned n = 0;
#pragma unroll 1
    while (enter()) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.0f;
#pragma unroll
      for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
      if (begin < end) {
        const unsigned slot = n % kStages, parity = n / kStages & 1;
        load_keys(k, smem.k, smem.q_full + 8 * slot, parity);
        load_keys(v, smem.v, smem.dout_full + 8 * slot, parity);
      }
      const unsigned first = n, last = n + (end - begin) - 1;
      for_each_step(n, [&](int, int m) { step(n, m, n == first, n == last); });
      if (kPassesLate && n != first) pass_dq();
      bar_sync(kKvBarrier, kKvThreads);
      if (!shares_keys(*this) || add_up_shared(*this, dk, dv, (group * 4 + warp) * 32 + fresh_thread() % 32)) {
        store<kHeadDimV>(params.dv, dv, 1.0f, smem.v);
        store<kHeadDim>(params.dk, dk, params.backward.softmax_scale, smem.k);
        if (leads) bulk_wait_read<0>();
      }
      mbarrier_arrive_warp(smem.kv_empty, leads);
      __syncwarp();
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ TiledBackwardParams params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  const Addresses smem(*reinterpret_cast<const SharedStorage*>(smem_bytes));
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) Loader(params, smem).run();
    else if (warp == 1) TurnWarp(params, smem).run();
    else DqWarp(params, smem, warp - 2).run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(params, smem, warp - 4).run();
  }
}
