// The loading warp of backward for one gradient on Hopper: a and c of each block of rows, b and d of each step.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "storage.cuh"

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
