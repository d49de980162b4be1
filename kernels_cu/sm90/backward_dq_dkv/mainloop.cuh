// The consumers of backward for one gradient on Hopper: the products of a block of rows, step after step.
#pragma once
#include "../pipeline/mod_step.cuh"
#include "../pipeline/shared_keys.cuh"
#include "loader.cuh"

enum NamedBarrier {
  kRowsRead = 1,  // one for each warpgroup, from this number on
  kSumsMade = kRowsRead + kNumConsumers,
};

using Scores = float[kColumns / 2];
using Pairs = unsigned[kColumns / 4];
using ModStep = ModStepOf<kHasMods, kColumns / 2, !kRowsAreQueries, kWithDp && kNeedsScoreModGrad>;

// True if scores become p beside ds, where their slope is needed.
constexpr bool kExponentiatesLate = kWithDp && (Score::kAlwaysChanges || kNeedsScoreModGrad);
// While the consumers of dv look ahead, they still hold a tile of dout.
static_assert(!kBlockSparse || kSecondStages > 1,
              "the loader would push of the next step only after they have left it");

struct Consumer : Role {
  const int group, warp;  // the consumer's number; the warp's number within it
  float out[kOutDim / 2];
  // If varlen: tiles of columns that all rows of this warpgroup see. Held, so that steps read no mask (L5).
  TileRange unmasked;

  __device__ __forceinline__ Consumer(const Role& role, int warp_idx)
      : Role(role), group(warp_idx / 4), warp(warp_idx % 4) {}

  // The thread's upper row within its head.
  __device__ __forceinline__ int row() const {
    return work.row_begin + group * kGroupRows + warp * 16 + fresh_thread() % 32 / 4;
  }

  // Issues x = a bᵀ of this warpgroup's rows with a tile of columns.
  template <int kDim>
  __device__ __forceinline__ void issue_scores(Scores& x, unsigned a_smem, unsigned b_smem) const {
    unsigned long long rows = wgmma_descriptor(a_smem + group * kGroupRows * 128);
    asm volatile("" : "+l"(rows));  // opaque, so that the compiler does not hold it in registers (L5)
    ::issue_abt<kDim, 0>(x, nullptr, rows, kPanelBytesRows, wgmma_descriptor(b_smem), kPanelBytesColumns);
  }

  // Sets masked scores of a tile of columns to -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, int tile) const {
    if (kVarlen && tile >= unmasked.begin && tile < unmasked.end) return;
    const Mask mask = work.rows_mask();
    const int begin = work.row_begin + group * kGroupRows, column = tile * kColumns;
    if (!kVarlen && mask.all_visible<true>({begin, begin + kGroupRows}, {column, column + kColumns})) return;
    mask.apply<true>(s, row(), column, fresh_thread() % 4);
  }

  // Reads lse or delta of the thread's elements 4 j … 4 j + 3. Element i has x[kRowsAreQueries ? i / 2 : i % 2].
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

  // Turns scores into p.
  __device__ __forceinline__ void exponentiate(float (&s)[4], const float (&lse)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale_log2_of(params.problem), -lse[kRowsAreQueries ? i / 2 : i % 2]));
    }
  }

  // Turns products into p, or into scores if their slope is needed later.
  __device__ __forceinline__ void exponentiate_scores(Scores& s, const ModStep& mod_step, int tile, bool is_full,
                                                      unsigned lse_smem) const {
    Score{params.problem.score}.apply(s);
    if (kSkipsFullTiles && is_full) mod_step.template apply<false>(s);
    else mod_step.template apply<kMaskMod>(s);
    apply_mask(s, tile);
    if constexpr (!kExponentiatesLate) {
      float lse[2];
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (j == 0 || !kRowsAreQueries) read_stats(lse, lse_smem, j);
        exponentiate(reinterpret_cast<float (&)[4]>(s[4 * j]), lse);
      }
    }
  }

  // Packs p, or ds, as left operands.
  __device__ __forceinline__ void pack(const Scores& s, const Scores& dp, const ModStep& mod_step, Pairs& weights,
                                       unsigned lse_smem, unsigned delta_smem) const {
    float lse[2], delta[2];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      float x[4], slope[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = s[4 * j + i];
      mod_step.score(x, slope, j);
      if constexpr (kWithDp) {
        const bool read = j == 0 || !kRowsAreQueries;
        if (kExponentiatesLate && read) read_stats(lse, lse_smem, j);
        if (read) read_stats(delta, delta_smem, j);
        if constexpr (kExponentiatesLate) exponentiate(x, lse);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = x[i];
          x[i] *= mod_step.gradient(dp[4 * j + i], 4 * j + i) - delta[kRowsAreQueries ? i / 2 : i % 2];
          if constexpr (Score::kAlwaysChanges) x[i] *= Score{params.problem.score}.slope(s[4 * j + i]);
          if constexpr (kScoreModGrad) x[i] *= slope[i];
          x[i] = mod_step.hidden_gradient(x[i], p);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = mod_step.weight(x[i], 4 * j + i);
      }
      weights[2 * j] = pack2(x[0], x[1]), weights[2 * j + 1] = pack2(x[2], x[3]);
    }
  }

  // Computes s and dp of step n: a query head and a tile of columns. Beside them runs the gradient of step n - 1, if
  // any. is_full: the mask_mod shows all of the tile. `look_ahead` runs beside a product.
  template <bool kFirst, class LookAhead>
  __device__ __forceinline__ void step(Pairs& weights, int head, int tile, bool is_full, unsigned n,
                                       LookAhead look_ahead) {
    const Slot<kStages> b(n), b_before(n - 1);
    const Slot<kSecondStages> d(n), d_before(n - 1);
    Scores s, dp;
    if constexpr (kWithDp && !kFirst)
      issue_ab<kColumns, kOutDim>(out, weights, smem.b + b_before.index * kBytesB, kPanelBytesColumns);
    mbarrier_wait(smem.b_full + 8 * b.index, b.parity);
    issue_scores<kHeadDim>(s, smem.a, smem.b + b.index * kBytesB);
    const ModStep mod_step(work, head, work.row_begin + group * kGroupRows + warp * 16, tile * kColumns);
    if constexpr (kWithDp) {
      mbarrier_wait(smem.d_full + 8 * d.index, d.parity);
      issue_scores<kHeadDimV>(dp, smem.c, smem.d + d.index * kBytesD);
      if constexpr (!kFirst) {
        wgmma_wait<2>(out);
        mbarrier_arrive_warp(smem.b_empty + 8 * b_before.index, is_leader);
      }
      wgmma_wait<1>(s);
      exponentiate_scores(s, mod_step, tile, is_full, smem.lse_of(n));
      look_ahead();
      wgmma_wait<0>(dp);
      pack(s, dp, mod_step, weights, smem.lse_of(n), smem.delta_of(n));
      mbarrier_arrive_warp(smem.d_empty + 8 * d.index, is_leader);
    } else {
      if constexpr (!kFirst) {
        mbarrier_wait(smem.d_full + 8 * d_before.index, d_before.parity);
        issue_ab<kColumns, kOutDim>(out, weights, smem.d + d_before.index * kBytesD, kPanelBytesColumns);
      }
      wgmma_wait<kFirst ? 0 : 1>(s);
      exponentiate_scores(s, mod_step, tile, is_full, smem.lse_of(n));
      look_ahead();
      mbarrier_arrive_warp(smem.b_empty + 8 * b.index, is_leader);
      if constexpr (!kFirst) {
        wgmma_wait<0>(out);
        mbarrier_arrive_warp(smem.d_empty + 8 * d_before.index, is_leader);
      }
      pack(s, s, mod_step, weights, 0, 0);
    }
  }

  // Computes the gradient of a block of rows. Returns the index of the step after its last one.
  __device__ __forceinline__ unsigned run(unsigned begin) {
#pragma unroll
    for (int i = 0; i < kOutDim / 2; ++i) out[i] = 0.0f;
    const int row_begin = work.row_begin + group * kGroupRows;
    if constexpr (kVarlen) unmasked = unmasked_tiles(work.rows_mask(), {row_begin, row_begin + kGroupRows}, kColumns);
    const AscendingTiles tiles = work.columns;
    const Range heads = work.heads();
    unsigned end = begin + tiles.count() * (heads.end - heads.begin);
    TileStep next = {0, VisibleTile(0)};
    if constexpr (kBlockSparse) next = work.pop();
    if (kBlockSparse ? !next.is_end() : end > begin) {
      Pairs weights;
      if constexpr (kBlockSparse) {
        const auto pop = [&] { next = work.pop(); };
        end = begin + 1;
        step<true>(weights, next.head, next.tile.n(), next.tile.is_full(), begin, pop);
#pragma unroll 1
        for (; !next.is_end(); ++end) {
          const TileStep tile_step = next;
          step<false>(weights, tile_step.head, tile_step.tile.n(), tile_step.tile.is_full(), end, pop);
        }
      } else {
        int tile = tiles.first(),
            head = kRowsAreQueries ? work.head : work.head * params.problem.heads_per_kv + heads.begin;
        step<true>(weights, head, tile, false, begin, [] {});
#pragma unroll 1
        for (unsigned n = begin + 1; n < end; ++n) {
          tile = tiles.next(tile);
          if (!tiles.has(tile)) tile = tiles.first(), ++head;
          step<false>(weights, head, tile, false, n, [] {});
        }
      }
      const Slot<kSecondStages> d(end - 1);
      if constexpr (!kWithDp) mbarrier_wait(smem.d_full + 8 * d.index, d.parity);
      const unsigned last = kWithDp ? smem.b + Slot<kStages>(end - 1).index * kBytesB : smem.d + d.index * kBytesD;
      issue_ab<kColumns, kOutDim>(out, weights, last, kPanelBytesColumns);
      wgmma_wait<0>(out);
      work.leave_columns(kWithDp ? smem.b_empty + 8 * Slot<kStages>(end - 1).index : smem.d_empty + 8 * d.index,
                         is_leader);
    }
    store();
    return end;
  }

  // Adds up the gradient of rows that two thread blocks share. Returns true in the thread block that ends last, which
  // has the whole sum.
  __device__ __forceinline__ bool add_up() {
    const int thread = fresh_thread() - 128;  // thread of the consumers, read again to hold no register
    const unsigned nth = row_block_idx();
    bar_sync(kSumsMade, kConsumerThreads);  // all have read lse, whose memory is overwritten now
    return add_in_order(params.semaphores + params.first_semaphore + nth, kSharers, smem.lse, kSumsMade, thread,
                        [&](bool first, bool last) { add_up_shared(out, params.acc, nth, thread, first, last); });
  }

  // Stores the warp's rows of the gradient, through the shared memory of a.
  __device__ __forceinline__ void store() {
    if constexpr (kSharesHeads) {
      if (!add_up()) return;
      work.find();  // again, as it would hold registers
    }
    zero_outside(out, row(), work.visible_rows());
    const float scale = kIsDv ? Dropout(params, 0, 0).scale() : params.problem.score.softmax_scale;
    const int within = group * kGroupRows + warp * 16;
    bar_sync(kRowsRead + group, 128);
    const auto rows = work.rows_from(work.row_begin + within);
    if constexpr (kAccumulates) {
      add_rows<kOutDim, kPanelsQk>(map_of_gradient(params), out, scale, smem.a + within * 128, kPanelBytesRows, rows,
                                   work.head, is_leader);
      return work.leave_rows(is_leader);
    }
    store_rows<kOutDim>(map_of_gradient(params), out, scale, smem.a + within * 128, kPanelBytesRows, rows, work.head,
                        is_leader);
    if (is_leader) bulk_wait_read<0>();
    work.leave_rows(is_leader);
  }
};
