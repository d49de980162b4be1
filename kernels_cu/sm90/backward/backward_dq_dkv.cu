// Backward on Hopper where dk and dv together do not fit in registers: one kernel each for dq, dk and dv. It computes
// blocks of rows (queries for dq, keys for dk and dv) over the columns that they see. No thread block waits for
// another, and nothing is added up in global memory. Exception: where key blocks of grouped heads are few, two thread
// blocks share each.
//
//              rows     columns  s = a bᵀ       dp = c dᵀ            the gradient, += from registers
//   dq         queries  keys     a = q, b = k   c = dout, d = v      ds b
//   dk         keys     queries  a = k, b = q   c = v, d = dout      ds b
//   dv         keys     queries  a = k, b = q                        p d
//
//   p = exp2(s c - lse)       ds = p (dp - delta) slope, with the slope of common/score.cuh; with mods: mod_step.cuh
//
// Roles    warpgroup 0  Warp 0 loads; if varlen, warp 1 schedules blocks of rows.
//          consumers    Each computes 64 rows with all columns. A step is a tile of columns:
//                       gradient of this tile, s and dp of the next | its p, beside dp | its ds
//                       For dv the s of the next tile is issued first.
// Barriers b_full, d_full    the tile has arrived with lse, or delta; the first one also with a, or c
//          b_empty, d_empty  all consumer warps have released it
//          full, empty       of work_ring.cuh if varlen, of step_ring.cuh if block-sparse
//          requested, rows_left  if varlen: dq_dkv_scheduler.cuh
//          kRowsRead         named, of a warpgroup: its warps have read its rows of a
//          kSumsMade         named, of all consumers: for rows that two thread blocks share
//
// If block-sparse (common/mask_tiles.cuh), the loader finds the visible tiles, and pushes them to the consumers
// (step_ring.cuh).
#include "../../ptx/cp_async.cuh"
#include "mod_step.cuh"
#include "dq_dkv_storage.cuh"
#include "shared_keys.cuh"

enum NamedBarrier {
  kRowsRead = 1,  // one for each warpgroup, from this number on
  kSumsMade = kRowsRead + kNumConsumers,
};

// The common state of all roles.
struct Role {
  const Params& params;
  const Addresses& smem;
  RowWork& work;
  const bool is_leader = threadIdx.x % 32 == 0;
};

// The loading warp. Its lanes run together, and the first lane copies tiles.
struct Loader : Role {
  template <bool kIsOfV, int kCount, class Rows>
  __device__ __forceinline__ void load(const TensorMap& map, unsigned target, unsigned barrier, const Rows& rows,
                                       int head) const {
    const int columns = kIsOfV ? params.problem.head_dim_v : params.problem.head_dim;
    load_panels<kIsOfV ? kPanelsV : kPanelsQk, kCount / kBoxRows, kBoxRows>(map, target, kCount * 128, barrier,
                                                                            boxed(rows, kBoxRows, columns), head);
  }

  // Loads lse or delta, if needed; every lane arrives at the barrier. cp.async replaces TMA, because racecheck would
  // need a fence in each reading lane (L41).
  __device__ __forceinline__ void load_stats(unsigned target, const float* stats, unsigned barrier, bool needed) const {
    const int at = threadIdx.x % 32 * 4;
    if (needed && at < kQueries) cp_async_16(target + at * 4, stats + at);
    cp_async_mbarrier_arrive(barrier);
  }

  // Loads all tiles of a block of rows. Returns the index of the step after them.
  __device__ __forceinline__ unsigned run(unsigned begin) const {
    const TensorMap& map_a = kRowsAreQueries ? params.q_map : params.k_map;
    const TensorMap& map_b = kRowsAreQueries ? params.k_map : params.q_map;
    const TensorMap& map_c = kRowsAreQueries ? params.dout_map : params.v_map;
    const TensorMap& map_d = kRowsAreQueries ? params.v_map : params.dout_map;
    const int heads_per_kv = params.problem.heads_per_kv;
    const auto rows = work.visible_rows_from(work.row_begin);
    const AscendingTiles tiles = work.columns;
    const Range heads = work.heads();
    unsigned n = begin;
#pragma unroll 1
    for (int i = heads.begin; i < heads.end; ++i) {
      const int head = kRowsAreQueries ? work.head / heads_per_kv : work.head * heads_per_kv + i;  // of the columns
      const int query_head = kRowsAreQueries ? work.head : head;
      const auto visible = [&] { return visible_tiles(work, query_head); };
#pragma unroll 1
      for (auto walk = walk_along(tiles, visible); walk.has_tile(); walk.go_on(), ++n) {
        const int tile = walk.n();
        if constexpr (kBlockSparse) work.push({query_head, VisibleTile(tile, walk.is_full())});
        walk.look_ahead();
        const bool first = n == begin, with_stats = first || !kRowsAreQueries;
        const Slot<kStages> b(n);
        const Slot<kSecondStages> d(n);
        const auto columns = read(work.visible_columns_from(tile * kColumns));  // no work between wait and copy (L17)
        const auto sequence = work.sequence();
        const float* const stats = params.stats + 2 * (sequence.query_head(query_head) * params.stats_rows) +
                                   sequence.padded_query(kRowsAreQueries ? work.row_begin : tile * kColumns);
        const unsigned b_full = smem.b_full + 8 * b.index, d_full = smem.d_full + 8 * d.index;
        mbarrier_wait(smem.b_empty + 8 * b.index, b.parity ^ 1);
        if (first) work.wait_rows_left();
        if (is_leader) {
          mbarrier_arrive_expect_tx(b_full, kBytesB + (first ? kBytesA : 0));
          if (first) load<false, kRows>(map_a, smem.a, b_full, rows, work.head);
          load<false, kColumns>(map_b, smem.b + b.index * kBytesB, b_full, columns, head);
        }
        __syncwarp();
        load_stats(smem.lse_of(n), stats, b_full, with_stats);
        mbarrier_wait(smem.d_empty + 8 * d.index, d.parity ^ 1);
        if (is_leader) {
          mbarrier_arrive_expect_tx(d_full, kBytesD + (first ? kBytesC : 0));
          if constexpr (kWithDp) {
            if (first) load<true, kRows>(map_c, smem.c, d_full, rows, work.head);
          }
          load<true, kColumns>(map_d, smem.d + d.index * kBytesD, d_full, columns, head);
        }
        __syncwarp();
        if constexpr (kWithDp) load_stats(smem.delta_of(n), stats + params.stats_rows, d_full, with_stats);
      }
    }
    if constexpr (kBlockSparse) work.push({0, VisibleTile::end()});
    if (n == begin) work.wait_rows_left();
    work.request_next(is_leader);
    return n;
  }
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

  // Adds the warp's rows to the float32 rows of the call.
  template <class AnyParams>
  __device__ __forceinline__ void add(const AnyParams& p) const {
    const float scale = kIsDv ? Dropout(p, 0, 0).scale() : p.problem.score.softmax_scale;
    add_rows(
        sums_of_gradient(p), out, scale, row(), work.visible_rows(), [&](int row) { return work.rows_from(row); },
        work.head, kIsDv ? p.problem.head_dim_v : p.problem.head_dim);
  }

  // Stores the warp's rows of the gradient, through the shared memory of a.
  __device__ __forceinline__ void store() {
    if constexpr (kSharesHeads) {
      if (!add_up()) return;
      work.find();  // again, as it would hold registers
    }
    if constexpr (kAccumulates) {
      add(params);
      return work.leave_rows(is_leader);
    }
    zero_outside(out, row(), work.visible_rows());
    const float scale = kIsDv ? Dropout(params, 0, 0).scale() : params.problem.score.softmax_scale;
    const int within = group * kGroupRows + warp * 16;
    bar_sync(kRowsRead + group, 128);
    store_rows<kOutDim>(map_of_gradient(params), out, scale, smem.a + within * 128, kPanelBytesRows,
                        work.rows_from(work.row_begin + within), work.head, is_leader);
    if (is_leader) bulk_wait_read<0>();
    work.leave_rows(is_leader);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Addresses smem{storage};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) storage.RowWork::SchedulerStorage::init(), smem.init();
  __syncthreads();
  RowWork work(params, storage);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) work.each(Loader{{params, smem, work}});
    if (warp == 1) work.schedule();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    work.each(Consumer({params, smem, work}, warp - 4));
  }
}
