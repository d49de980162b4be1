// The consumers of backward in clusters: a warpgroup each for dv, dk and dq.
#pragma once
#include "../../common/accumulators.cuh"
#include "../../common/mods.cuh"
#include "../../ptx/red.cuh"
#include "storage.cuh"

using Scores = float[kBlockQ / 2];
using Pairs = unsigned[kBlockQ / 4];

// Returns wgmma_descriptor. In a cluster an address has the thread block's rank above the 18 bits of its offset (L24).
__device__ __forceinline__ unsigned long long descriptor(unsigned smem_address, unsigned panel_bytes = 16) {
  return wgmma_descriptor(smem_address & 0x3ffff, panel_bytes);
}

// Returns an opaque descriptor, so that the compiler does not hold its steps in registers (L5).
__device__ __forceinline__ unsigned long long fresh_descriptor(unsigned smem_address) {
  unsigned long long x = descriptor(smem_address);
  asm volatile("" : "+l"(x));
  return x;
}

// Issues x += a b by multiply(part of x, step, b), in products of 128 columns. A wider one needs 158 registers, more
// than a thread has at launch (C7602).
template <int kColumns, class Multiply>
__device__ __forceinline__ void issue_by_128(float (&x)[kColumns / 2], unsigned b_smem, Multiply multiply) {
  const unsigned long long b = descriptor(b_smem, kPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kBlockQ / 16; ++kk) {
#pragma unroll
    for (int part = 0; part < kColumns / 128; ++part) {
      float (&y)[64] = reinterpret_cast<float (&)[64]>(x[part * 64]);
      multiply(y, kk, b + wgmma_rows(kk) + part * (2 * kPanelBytes / 16));
    }
  }
  wgmma_commit();
}

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
