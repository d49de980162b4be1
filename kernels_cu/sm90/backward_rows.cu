// Backward on Hopper where dk and dv do not fit the registers side by side: one of dq, dk, dv at a time, for blocks of
// rows (queries for dq, keys for dk and dv) over the columns that they see. No sums in memory, and no order among
// blocks.
//
//              rows     columns  s = a bᵀ       dp = c dᵀ     the gradient, += from registers
//   dq         queries  keys     a = q, b = k   c = dout, d = v   ds b
//   dk         keys     queries  a = k, b = q   c = v, d = dout   ds b
//   dv         keys     queries  a = k, b = q                      p d
//
// Roles    warpgroup 0: one warp copies          the others: 64 rows each, all columns. A step is a tile of columns:
//          gradient of this tile, s and dp of the next | its p, beside dp | its ds; for dv s of the next goes first
// Barriers b_full, d_full    has arrived, the first with a, or c    …_empty    every warp is done with it
#include "../ptx/cp_async.cuh"
#include "gradient_rows.cuh"

constexpr int kNoRow = 1 << 30;

// One warp, all lanes in step; the first one copies tiles.
struct Loader {
  const TiledBackwardParams& params;
  const Addresses& smem;
  const Work& work;
  const bool leads = threadIdx.x % 32 == 0;

  template <int kPanels, int kCount>
  __device__ __forceinline__ void load(const TensorMap& map, unsigned target, unsigned barrier, int row,
                                       int head) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
      for (int box = 0; box < kCount; box += kBoxRows) {
        // why: whether a copy may lie before the first row altogether is written nowhere; after the last one it may.
        const int from = row + box > -kBoxRows ? row + box : kNoRow;
        tma_load_4d(target + (panel * kCount + box) * 128, &map, barrier, panel * kPanelColumns, from, head,
                    work.batch);
      }
    }
  }

  // lse or delta, if they are needed, and an arrival of every lane. why not by the copy engine: those who read what it
  // is to replace would have to fence before, which costs up to 1 %.
  __device__ __forceinline__ void load_stats(unsigned target, const float* stats, unsigned barrier, bool needed) const {
    const int at = threadIdx.x % 32 * 4;
    if (needed && at < kQueries) cp_async_16(target + at * 4, stats + at);
    cp_async_mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void run() const {
    const BackwardParams& p = params.backward;
    const TensorMap& map_a = kRowsAreQueries ? params.q : params.k;
    const TensorMap& map_b = kRowsAreQueries ? params.k : params.q;
    const TensorMap& map_c = kRowsAreQueries ? params.dout : params.v;
    const TensorMap& map_d = kRowsAreQueries ? params.v : params.dout;
    const int first_row = kRowsAreQueries ? p.row_begin : p.key_begin;
    const int first_column = kRowsAreQueries ? p.key_begin : p.row_begin;
    unsigned n = 0;
#pragma unroll 1
    for (int i = 0; i < work.num_heads; ++i) {
      const int head = kRowsAreQueries ? work.head / p.heads_per_kv : work.head * p.heads_per_kv + i;
#pragma unroll 1
      for (int tile = work.begin; tile < work.end; ++tile, ++n) {
        const bool first = n == 0, with_stats = first || !kRowsAreQueries;
        const Slot<kStages> b(n);
        const Slot<kSecondStages> d(n);
        const int column = tile * kColumns;
        const float* const stats =
            reinterpret_cast<const float*>(p.stats) +
            (static_cast<long long>(work.batch) * p.heads_q + (kRowsAreQueries ? work.head : head)) * 2 * p.stats_rows +
            (kRowsAreQueries ? work.row_begin : column);
        const unsigned b_full = smem.b_full + 8 * b.index, d_full = smem.d_full + 8 * d.index;
        mbarrier_wait(smem.b_empty + 8 * b.index, b.parity ^ 1);
        if (leads) {
          mbarrier_arrive_expect_tx(b_full, kBytesB + (first ? kBytesA : 0));
          if (first) load<kPanelsQk, kRows>(map_a, smem.a, b_full, work.row_begin - first_row, work.head);
          load<kPanelsQk, kColumns>(map_b, smem.b + b.index * kBytesB, b_full, column - first_column, head);
        }
        __syncwarp();
        load_stats(smem.lse_of(n), stats, b_full, with_stats);
        mbarrier_wait(smem.d_empty + 8 * d.index, d.parity ^ 1);
        if (leads) {
          mbarrier_arrive_expect_tx(d_full, kBytesD + (first ? kBytesC : 0));
          if constexpr (kWithDp) {
            if (first) load<kPanelsV, kRows>(map_c, smem.c, d_full, work.row_begin - first_row, work.head);
          }
          load<kPanelsV, kColumns>(map_d, smem.d + d.index * kBytesD, d_full, column - first_column, head);
        }
        __syncwarp();
        if constexpr (kWithDp) load_stats(smem.delta_of(n), stats + p.stats_rows, d_full, with_stats);
      }
    }
  }
};

using Scores = float[kColumns / 2];
using Pairs = unsigned[kColumns / 4];

struct Consumer {
  const TiledBackwardParams& params;
  const Addresses& smem;
  const Work& work;
  const int group, warp;  // of the warpgroups that compute; of the group
  const bool leads = threadIdx.x % 32 == 0;
  float out[kOutDim / 2];

  __device__ __forceinline__ Consumer(const TiledBackwardParams& p, const Addresses& s, const Work& w, int warp_idx)
      : params(p), smem(s), work(w), group(warp_idx / 4), warp(warp_idx % 4) {}

  // The thread's upper row within its head.
  __device__ __forceinline__ int row() const {
    return work.row_begin + group * kGroupRows + warp * 16 + fresh_thread() % 32 / 4;
  }

  // x = a bᵀ, begun: this warpgroup's rows with a tile of columns.
  template <int kDim>
  __device__ __forceinline__ void begin_scores(Scores& x, unsigned a_smem, unsigned b_smem) const {
    unsigned long long rows = wgmma_descriptor(a_smem + group * kGroupRows * 128);
    asm volatile("" : "+l"(rows));  // why: or all descriptors are formed ahead of the loop, in registers
    ::begin_scores<kDim, 0>(x, nullptr, rows, kPanelBytesRows, wgmma_descriptor(b_smem), kPanelBytesColumns);
  }

  // Scores that are not seen, of columns from `column` on, become -inf.
  __device__ __forceinline__ void hide(Scores& s, int column) const {
    const Mask mask = Work::rows_mask(params.backward);
    const int begin = work.row_begin + group * kGroupRows;
    const KeyRange full = mask.full_range(begin, begin + kGroupRows);
    if (column >= full.begin && column + kColumns <= full.end && begin + kGroupRows <= mask.seqlen_q) return;
    mask.apply<true>(s, row(), column, fresh_thread() % 4);
  }

  // lse or delta of the elements 4 j … 4 j + 3 of the thread: that of element i is x[kRowsAreQueries ? i / 2 : i % 2].
  __device__ __forceinline__ void read_stats(float (&x)[2], unsigned stats, int j) const {
    unsigned y[2];
    if constexpr (kRowsAreQueries) {
      const unsigned upper = stats + (group * kGroupRows + warp * 16 + fresh_thread() % 32 / 4) * 4;
      y[0] = ld_shared_u32(upper), y[1] = ld_shared_u32(upper + 32);
    } else {
      ld_shared_v2(y[0], y[1], stats + fresh_thread() % 4 * 8 + j * 32);
    }
    x[0] = __uint_as_float(y[0]), x[1] = __uint_as_float(y[1]);
  }

  // Scores, capped ones with kSoftcap, become p.
  __device__ __forceinline__ void exponentiate(float (&s)[4], const float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = exp2_approx(fmaf(s[i], params.backward.scale_log2, -lse[kRowsAreQueries ? i / 2 : i % 2]));
    }
  }

  // s becomes p; with kSoftcap it stays the capped score where ds is still to be made of it.
  __device__ __forceinline__ void weigh_scores(Scores& s, int tile, unsigned lse_smem) const {
    if constexpr (kSoftcap) cap(s, params.backward.softcap_scale);
    hide(s, tile * kColumns);
    if constexpr (!kSoftcap || !kWithDp) {
      float lse[2];
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (j == 0 || !kRowsAreQueries) read_stats(lse, lse_smem, j);
        exponentiate(reinterpret_cast<float (&)[4]>(s[4 * j]), lse);
      }
    }
  }

  // p, or ds, as left operands.
  __device__ __forceinline__ void pack(const Scores& s, const Scores& dp, Pairs& weights, unsigned lse_smem,
                                       unsigned delta_smem) const {
    float lse[2], delta[2];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = s[4 * j + i];
      if constexpr (kWithDp) {
        const bool read = j == 0 || !kRowsAreQueries;
        if (kSoftcap && read) read_stats(lse, lse_smem, j);
        if (read) read_stats(delta, delta_smem, j);
        if constexpr (kSoftcap) exponentiate(x, lse);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] *= dp[4 * j + i] - delta[kRowsAreQueries ? i / 2 : i % 2];
          if constexpr (kSoftcap) x[i] *= softcap_slope(s[4 * j + i]);
        }
      }
      weights[2 * j] = pack2(x[0], x[1]), weights[2 * j + 1] = pack2(x[2], x[3]);
    }
  }

  // s and dp of step n, its tile of columns and, but for the first, the gradient of step n - 1 beside them.
  template <bool kFirst>
  __device__ __forceinline__ void step(Pairs& weights, int tile, unsigned n) {
    const Slot<kStages> b(n), b_before(n - 1);
    const Slot<kSecondStages> d(n), d_before(n - 1);
    Scores s, dp;
    if constexpr (kWithDp && !kFirst)
      begin_sum<kColumns, kOutDim>(out, weights, smem.b + b_before.index * kBytesB, kPanelBytesColumns);
    mbarrier_wait(smem.b_full + 8 * b.index, b.parity);
    begin_scores<kHeadDim>(s, smem.a, smem.b + b.index * kBytesB);
    if constexpr (kWithDp) {
      mbarrier_wait(smem.d_full + 8 * d.index, d.parity);
      begin_scores<kHeadDimV>(dp, smem.c, smem.d + d.index * kBytesD);
      if constexpr (!kFirst) {
        wgmma_wait<2>();
        wgmma_pin(out);
        mbarrier_arrive_warp(smem.b_empty + 8 * b_before.index, leads);
      }
      wgmma_wait<1>();
      wgmma_pin(s);
      weigh_scores(s, tile, smem.lse_of(n));
      wgmma_wait<0>();
      wgmma_pin(dp);
      pack(s, dp, weights, smem.lse_of(n), smem.delta_of(n));
      mbarrier_arrive_warp(smem.d_empty + 8 * d.index, leads);
    } else {
      if constexpr (!kFirst) {
        mbarrier_wait(smem.d_full + 8 * d_before.index, d_before.parity);
        begin_sum<kColumns, kOutDim>(out, weights, smem.d + d_before.index * kBytesD, kPanelBytesColumns);
      }
      wgmma_wait<kFirst ? 0 : 1>();
      wgmma_pin(s);
      weigh_scores(s, tile, smem.lse_of(n));
      mbarrier_arrive_warp(smem.b_empty + 8 * b.index, leads);
      if constexpr (!kFirst) {
        wgmma_wait<0>();
        wgmma_pin(out);
        mbarrier_arrive_warp(smem.d_empty + 8 * d_before.index, leads);
      }
      pack(s, s, weights, 0, 0);
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < kOutDim / 2; ++i) out[i] = 0.0f;
    const unsigned steps = (work.end - work.begin) * work.num_heads;
    if (steps > 0) {
      Pairs weights;
      step<true>(weights, work.begin, 0);
      int tile = work.begin;
#pragma unroll 1
      for (unsigned n = 1; n < steps; ++n) {
        if (++tile == work.end) tile = work.begin;
        step<false>(weights, tile, n);
      }
      const Slot<kSecondStages> d(steps - 1);
      if constexpr (!kWithDp) mbarrier_wait(smem.d_full + 8 * d.index, d.parity);
      const unsigned last = kWithDp ? smem.b + Slot<kStages>(steps - 1).index * kBytesB : smem.d + d.index * kBytesD;
      begin_sum<kColumns, kOutDim>(out, weights, last, kPanelBytesColumns);
      wgmma_wait<0>();
      wgmma_pin(out);
    }
    store();
  }

  // The warp's rows, from where a was.
  __device__ __forceinline__ void store() {
    const BackwardParams& p = params.backward;
    const TensorMap& map = kGradient == Gradient::kDq ? params.dq : kGradient == Gradient::kDk ? params.dk : params.dv;
    const int begin = kRowsAreQueries ? p.row_begin : p.key_begin, end = kRowsAreQueries ? p.row_end : p.key_end;
    clear_outside(out, row(), begin, end);
    const float scale = kGradient == Gradient::kDv ? 1.0f : p.softmax_scale;
    const int within = group * kGroupRows + warp * 16;
    const unsigned target = smem.a + within * 128;
    bar_sync(1 + group, 128);  // the warpgroup is done with its rows of a
    store_rows<kOutDim>(out, scale, target, kPanelBytesRows);
    fence_proxy_async();
    __syncwarp();
    if (leads) {
#pragma unroll
      for (int panel = 0; panel < (kOutDim + 63) / 64; ++panel) {
        tma_store_4d(&map, target + panel * kPanelBytesRows, panel * kPanelColumns, work.row_begin + within, work.head,
                     work.batch);
      }
      bulk_commit();
      bulk_wait_read<0>();
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
  const Work work(params.backward);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) Loader{params, smem, work}.run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(params, smem, work, warp - 4).run();
  }
}
