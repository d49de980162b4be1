// Backward on Hopper in clusters of two thread blocks, for head dims over 192: dk and dv of 128 keys over the queries
// that see them, and these keys' contribution to dq. (FlashAttention-2, arXiv 2307.08691, algorithm 2.)
//
//   s = k qᵀ, dp = v doutᵀ    wgmma, transposed: rows are the 64 keys of a thread block
//   p = exp2(s c - lse)       ds = p slope (dp - delta), with the slope of common/score.cuh
//   dv += p dout, dk += ds q  wgmma, p from registers, ds from shared memory
//   dq += dsᵀ k               wgmma over the keys of both thread blocks, which exchange ds. Each has half of the
//   columns,
//                             so half as much is added to dq in memory. portable/convert.cu rounds the sum.
//
// Roles    warpgroup 0  Warp 0 loads tiles, and warp 1 lse and delta.
//          warpgroup 1  s, p and dv. It passes p slope to warpgroup 2 as floats.
//          warpgroup 2  dp, ds and dk. It copies ds to the other thread block.
//          warpgroup 3  dq, added to the accumulator from registers
//                       Each step is a tile of queries. Warpgroups 1 and 2 issue dv and dk of the step before ahead of
//                       s and dp, so that tiles are released early, and overlap each other's pointwise work.
// Barriers q_full, dout_full     the tile has arrived with lse, or delta; the first one with k, or v
//          q_empty, dout_empty   all warps of warpgroups 1 and 2 have released it
//          ds_full               ds of both thread blocks is in this one's shared memory
//          ds_empty              the warpgroups of dq of both thread blocks have read this one's ds
//          named barriers        cluster_storage.cuh
#include "../../common/accumulators.cuh"
#include "../../common/mods.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/grid.cuh"
#include "../../ptx/red.cuh"
#include "cluster_storage.cuh"

using Scores = float[kBlockQ / 2];
using Pairs = unsigned[kBlockQ / 4];

// The warp that loads tiles. Its lanes run together, and the first lane acts (L13).
struct Loader : Role {
  using Role::Role;

  // Issues the loads of k and v, which count at the barriers of the first tiles.
  __device__ __forceinline__ void load_keys() const {
    const auto of = sequence();
    const auto rows_from = [&](int key) {
      MapRows rows = of.visible_keys_from(key);
      if (rows.row <= -kGroupRows) rows.row = 1 << 30;  // past the map, as in load_panels
      return rows;
    };
    const MapRows keys = rows_from(first_key()), peer_keys = rows_from(block * kBlockK + (rank ^ 1) * kGroupRows);
    mbarrier_expect_tx(smem.q_full, kBytesQk + kBytesPeerK), mbarrier_expect_tx(smem.dout_full, kBytesV);
    load_panels<kPanelsQk>(params.k_map, smem.k, kPanelBytes, smem.q_full, keys, kv_head);
    load_panels<kPanelsV>(params.v_map, smem.v, kPanelBytes, smem.dout_full, keys, kv_head);
#pragma unroll
    for (int panel = 0; panel < kDqPanels; ++panel) {
      load_box(smem.peer_k + panel * kPanelBytes, params.k_map, smem.q_full, rank * kDqColumns + panel * kPanelColumns,
               peer_keys, kv_head);
    }
  }

  __device__ __forceinline__ void run() {
    if (is_leader && count() > 0) load_keys();
    __syncwarp();
    unsigned n = 0;
    for_each_step(n, [&](int head, int m, bool) {
      const unsigned q_full = smem.q_full + 8 * (n % kStages), dout_full = smem.dout_full + 8 * (n % kStages);
      const auto rows = sequence().visible_queries_from(m * kBlockQ);
      wait_empty(smem.q_empty, n);
      if (is_leader) {
        mbarrier_arrive_expect_tx(q_full, kBytesQk);
        load_panels<kPanelsQk>(params.q_map, q(n), kPanelBytes, q_full, rows, head);
      }
      __syncwarp();
      wait_empty(smem.dout_empty, n);
      if (is_leader) {
        mbarrier_arrive_expect_tx(dout_full, kBytesV);
        load_panels<kPanelsV>(params.dout_map, dout(n), kPanelBytes, dout_full, rows, head);
      }
      __syncwarp();
    });
  }
};

// A warp that loads lse and delta. By cp.async, as racecheck would need a fence in each lane that reads what TMA will
// overwrite (L41); and not in the other loading warp, whose registers do not suffice.
struct StatsLoader : Role {
  using Role::Role;

  // Every lane arrives at the barrier.
  __device__ __forceinline__ void load(unsigned target, const float* stats, unsigned barrier) const {
    const unsigned lane = threadIdx.x % 32;
    if (lane < kBlockQ / 4) cp_async_16(target + lane * 16, stats + lane * 4);
    cp_async_mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void run() {
    unsigned n = 0;
    for_each_step(n, [&](int head, int m, bool) {
      const unsigned slot = n % kStages, target = smem.stats + slot * 2 * kBytesStats;
      const float* const lse = params.stats + 2 * (sequence().query_head(head) * params.stats_rows) + m * kBlockQ;
      wait_empty(smem.q_empty, n);
      load(target, lse, smem.q_full + 8 * slot);
      wait_empty(smem.dout_empty, n);
      load(target + kBytesStats, lse + params.stats_rows, smem.dout_full + 8 * slot);
    });
  }
};

struct DvGroup : Role {
  using Role::Role;

  __device__ __forceinline__ void issue_s(Scores& s, unsigned n) const {
    ::issue_abt<kHeadDim, 0>(s, nullptr, fresh_descriptor(smem.k), kPanelBytes, descriptor(q(n)), kPanelBytes);
  }

  __device__ __forceinline__ void issue_dv(float (&dv)[kHeadDimV / 2], const Pairs& weights, unsigned n) const {
    issue_by_128<kHeadDimV>(dv, dout(n), [&](float (&x)[64], int kk, unsigned long long b) {
      Wgmma<128>::template rs<kIsFloat16, true>(x, weights + 4 * kk, b, true);
    });
  }

  __device__ __forceinline__ void apply_mask(Scores& s, int m) const {
    const int key = first_key(), query = m * kBlockQ;
    const Mask mask = sequence().mask().transposed();
    if (mask.all_visible<true>({key, key + kGroupRows}, {query, query + kBlockQ})) return;
    mask.apply<true>(s, key + thread() / 32 % 4 * 16 + thread() % 32 / 4, query, thread() % 4);
  }

  // Computes p of step n, a query tile m, and dv of step n - 1.
  template <bool kFirst>
  __device__ __forceinline__ void step(float (&dv)[kHeadDimV / 2], Pairs& weights, int m, unsigned n) const {
    Scores s;
    if constexpr (!kFirst) {
      wait(smem.dout_full, n - 1);
      issue_dv(dv, weights, n - 1);
    }
    wait(smem.q_full, n);
    issue_s(s, n);
    if constexpr (!kFirst) {
      wgmma_wait<1>(dv);
      release(smem.dout_empty, n - 1);
    }
    // Read ahead of the wait, as additions to dq hold up reads behind it (L57). With a softcap that would spill
    // registers.
    constexpr bool kReadsAhead = !Score::kAlwaysChanges;
    unsigned lse[kBlockQ / 8][2];
    const unsigned lse_smem = stats(n);
    auto read_lse = [&](int j) { ld_shared_v2(lse[j][0], lse[j][1], lse_smem + j * 32); };
#pragma unroll
    for (int j = 0; kReadsAhead && j < kBlockQ / 8; ++j) read_lse(j);
    wgmma_wait<0>(s);
    Score{params.problem.score}.apply(s);
    apply_mask(s, m);
    const unsigned warp = thread() / 32 % 4, piece = p();
    const float scale = scale_log2_of(params.problem);
#pragma unroll
    for (int j = 0; j < kBlockQ / 8; ++j) {
      if constexpr (!kReadsAhead) read_lse(j);
      unsigned sloped[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        const float score = x;
        x = exp2_approx(fmaf(score, scale, -__uint_as_float(lse[j][i % 2])));
        const float slope = Score::kAlwaysChanges ? Score{params.problem.score}.slope(score) : 1.0f;
        sloped[i] = __float_as_uint(x * slope);
      }
      if (kFirst && j == 0) bar_sync(kVRead, 256);
      else if (j % kPiece == 0) bar_sync(kPEmpty + warp, 64);
      st_shared_v4(piece + j % kPiece * 2048, sloped);
      if (j % kPiece == kPiece - 1) bar_arrive(kPFull + warp, 64);
    }
    release(smem.q_empty, n);
#pragma unroll
    for (int i = 0; i < kBlockQ / 4; ++i) weights[i] = pack2(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void run() {
    float dv[kHeadDimV / 2];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.0f;
    Pairs weights;
    unsigned n = 0;
    for_each_step(n, [&](int, int m, bool) {
      if (n == 0) step<true>(dv, weights, m, n);
      else step<false>(dv, weights, m, n);
    });
    if (n > 0) {
      wait(smem.dout_full, n - 1);
      issue_dv(dv, weights, n - 1);
      wgmma_wait<0>(dv);
    }
    // The place of the tile before the last one: dp of warpgroup 2 has read it, as the last p was read behind that.
    bar_sync(kDvComputed, 128);
    store<kHeadDimV>(params.dv_map, dv, 1.0f, dout(n));
  }
};

struct DkGroup : Role {
  using Role::Role;

  // Issues dp - delta: the sum begins with -delta.
  template <int kCount>
  __device__ __forceinline__ void issue_dp(Scores& dp, const unsigned (&v)[kCount][4], unsigned n) const {
    const unsigned delta = stats(n) + kBytesStats;
#pragma unroll
    for (int j = 0; j < kBlockQ / 8; ++j) {
      unsigned x[2];
      ld_shared_v2(x[0], x[1], delta + j * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) dp[4 * j + i] = -__uint_as_float(x[i % 2]);
    }
    ::issue_abt<kHeadDimV, kVSteps>(dp, v, fresh_descriptor(smem.v), kPanelBytes, descriptor(dout(n)), kPanelBytes,
                                    true);
  }

  __device__ __forceinline__ void issue_dk(float (&dk)[kHeadDim / 2], unsigned n) const {
    const unsigned long long ds = fresh_descriptor(smem.ds);
    issue_by_128<kHeadDim>(dk, q(n), [&](float (&x)[64], int kk, unsigned long long b) {
      Wgmma<128>::template ss<kIsFloat16, true, true>(x, ds + wgmma_rows(kk), b, true);
    });
  }

  // Copies ds of this thread block, which all warps have written, to the other thread block. One thread calls.
  __device__ __forceinline__ void exchange_ds() const {
    mbarrier_arrive_expect_tx(smem.ds_full, kPanelBytes);
    bulk_copy_cluster(cluster_address(smem.ds + kPanelBytes, rank ^ 1), smem.ds, kPanelBytes,
                      cluster_address(smem.ds_full, rank ^ 1));
  }

  // Computes ds of step n, and dk of step n - 1. `end`: the number of steps.
  template <bool kFirst, int kCount>
  __device__ __forceinline__ void step(float (&dk)[kHeadDim / 2], const unsigned (&v)[kCount][4], unsigned n,
                                       unsigned end) const {
    Scores dp;
    if constexpr (!kFirst) issue_dk(dk, n - 1);
    wait(smem.dout_full, n);
    issue_dp(dp, v, n);
    if constexpr (!kFirst) {
      wgmma_wait<1>(dk);
      release(smem.q_empty, n - 1);
    }
    wgmma_wait<0>(dp);
    const unsigned warp = thread() / 32 % 4, piece = p();
    Pairs ds;
#pragma unroll
    for (int j = 0; j < kBlockQ / 8; ++j) {
      if (j % kPiece == 0) bar_sync(kPFull + warp, 64);
      const float4 x = ld_shared_v4_f32(piece + j % kPiece * 2048);
      if (j % kPiece == kPiece - 1 && (j < kBlockQ / 8 - 1 || n + 1 < end)) bar_arrive(kPEmpty + warp, 64);
      ds[2 * j] = pack2(x.x * dp[4 * j], x.y * dp[4 * j + 1]);
      ds[2 * j + 1] = pack2(x.z * dp[4 * j + 2], x.w * dp[4 * j + 3]);
    }
    release(smem.dout_empty, n);
    mbarrier_wait(smem.ds_empty, n & 1 ^ 1);
    const unsigned lane = thread() % 32;
    const unsigned target = smem.ds + Swizzle<8>::offset(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int kk = 0; kk < kBlockQ / 16; ++kk) stmatrix_x4_trans(target + kk * 2048, ds + 4 * kk);
    fence_proxy_async();
    bar_sync(kDsWritten, 128);
    if (warp == 0 && is_leader) exchange_ds();
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    float dk[kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.0f;
    const unsigned end = count();
    if (end > 0) {
      unsigned v[kVSteps][4];
      wait(smem.dout_full, 0);
      load_rows<kVSteps>(v, row_address(smem.v + thread() / 32 % 4 * 2048), kPanelBytes);
      bar_arrive(kVRead, 256);
      step<true>(dk, v, 0, end);
#pragma unroll 1
      for (unsigned n = 1; n < end; ++n) step<false>(dk, v, n, end);
      issue_dk(dk, end - 1);
      wgmma_wait<0>(dk);
    }
    const Role again(params, smem);  // as its members would hold registers in the loop
    again.store<kHeadDim>(params.dk_map, dk, params.problem.score.softmax_scale, q(end));
  }
};

struct DqGroup : Role {
  using Role::Role;

  __device__ __forceinline__ void run() {
    const unsigned peer_empty = cluster_address(smem.ds_empty, rank ^ 1), warp = thread() / 32 % 4;
    unsigned n = 0;
    for_each_step(n, [&](int head, int m, bool) {
      const auto of = sequence();
      const int row = m * kBlockQ + 16 * warp;
      float* const strip =
          fragment_strip(params.dq_acc, of.query_head(head), of.seqlen_q(), of.query_strip(row), kHeadDim);
      float* const target = strip + rank * kDqColumns / 8 * kFragmentFloats + thread() % 32 * 4;
      mbarrier_wait(smem.ds_full, n & 1);  // k has arrived before, as s of its first step needed it
#pragma unroll
      for (int panel = 0; panel < kDqPanels; ++panel) {
        float dq[kPanelColumns / 2];
        const unsigned long long ds = descriptor(smem.ds);
        const unsigned long long k = descriptor(smem.k + rank * kBytesPeerK + panel * kPanelBytes);
        const unsigned long long peer_k = descriptor(smem.peer_k + panel * kPanelBytes);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < kBlockK / 16; ++kk) {
          const unsigned long long rows = (kk < 4 ? k : peer_k) + wgmma_rows(kk % 4);
          Wgmma<kPanelColumns>::template ss<kIsFloat16, true>(dq, ds + wgmma_columns(kk, kPanelBytes), rows, kk > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(dq);
        if (panel == kDqPanels - 1) {
          __syncwarp();
          if (is_leader) mbarrier_arrive(smem.ds_empty), mbarrier_arrive_cluster(peer_empty);
        }
        if (row >= of.seqlen_q()) continue;
#pragma unroll
        for (int j = 0; j < kPanelColumns / 8; ++j) {
          // 16 KB at once would hold up what other warps read from shared memory: 9 % of a call (L57).
          if (j > 0 && j % 2 == 0) __nanosleep(100);
          const float* const x = dq + 4 * j;
          red_add_v4_f32(target + (panel * kPanelColumns / 8 + j) * kFragmentFloats, x[0], x[1], x[2], x[3]);
        }
      }
    });
  }
};

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Addresses smem{storage};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) smem.init();
  cluster_sync();  // the other thread block's barriers exist
  wait_kernels_ahead();
  if (group == 0) {
    setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x < 32) Loader(params, smem).run();
    else if (threadIdx.x < 64) StatsLoader(params, smem).run();
  } else if (group == 1) {
    setmaxnreg_inc<kDvRegisters>();
    DvGroup(params, smem).run();
  } else if (group == 2) {
    setmaxnreg_inc<kDkRegisters>();
    DkGroup(params, smem).run();
  } else {
    setmaxnreg_dec<kDqRegisters>();
    DqGroup(params, smem).run();
  }
  cluster_sync();  // the other thread block accesses nothing here any more
}
