// The main loop of the kernels that compute out: the steps of a warpgroup over the key tiles of its work tiles.
#pragma once
#include "consumer.cuh"

using Weights = unsigned[kBlockK / 4];
using Output = float[kHeadDimV / 2];

// Derived provides store(softmax), which stores the rows of the previous work tile.
template <class Derived>
struct ForwardMainloop : Consumer {
  Weights p;
  Output o;
  float o_scale[2];
  NextTile next_tile;
  bool has_begun = false;  // if block-sparse: a fully visible key tile of this work tile was computed

  using Consumer::Consumer;

  // Runs over all work tiles. The last p v of each is issued together with the first s of the next one. With
  // kNextScoresFirst its rows are stored after both, otherwise beside that s.
  __device__ __forceinline__ void run() {
    smem.wait_work(0);
    if (kVarlen && !smem.work(0).exists()) return;  // the grid covers the largest possible number of work tiles
    if (kPingPong && group == kNumConsumers - 1) bar_arrive(kIssue, 256);
    GroupKeys keys(params.problem, smem.work(0), group);
    bool skips_v = keys.skips_first;  // v of a skipped key tile comes next in the ring
    unsigned k_slot = issue_first_qk(keys);
    if constexpr (kNextScoresFirst) softmax_first_tile<0>(keys, k_slot);
#pragma unroll 1
    for (;;) {
      if constexpr (!kNextScoresFirst) softmax_first_tile<0>(keys, k_slot);
      if (skips_v) skip();
      if (keys.skips_first) skip_issue();
      pack();
      const bool accumulate = steps(keys);

      smem.wait_work(++i);
      const QueryWork next = smem.work(i);
      const bool skips_last = keys.skips_last;
      if (skips_last) skip(), skip_issue();
      if (!next.exists()) {  // a copy of the end: no product may pend over a branch that issues one (L12)
        issue_next_pv(accumulate);
        wgmma_wait<0>(o);
        self().store(softmax);
        if (is_leader) bulk_wait_read<0>();
        break;
      }
      wait_issue();
      if constexpr (kNextScoresFirst) {
        keys = GroupKeys(params.problem, next, group);
        if (keys.skips_first && !skips_last) skip();
        skips_v = skips_last || keys.skips_first;
        const PipelineState first = ring.advance();
        if (keys.skips_first && skips_last) skip(), skip();  // the first k, and v of the previous work's last tile
        const PipelineState second = ring.advance();
        // v of a skipped key tile precedes the next k in the ring.
        const PipelineState k = skips_v ? second : first, v = skips_v ? first : second;
        wait_query();
        issue_qk(s, q, smem.q_rows(i, group), wait(k));
        issue_ab<kBlockK, kHeadDimV>(o, p, wait(v), kPanelBytesK, accumulate);
        k_slot = k.slot;
        const unsigned v_slot = v.slot;
        pass_issue();
        const Softmax done = softmax;
        softmax_first_tile<1>(keys, k_slot);
        finish_pv(v_slot);
        self().store(done);
      } else {
        const unsigned v_slot = issue_next_pv(accumulate);
        if (skips_last) skip();
        keys = GroupKeys(params.problem, next, group);
        skips_v = keys.skips_first;
        k_slot = issue_first_qk(keys);
        pass_issue();
        wgmma_wait<1>(o);
        release(v_slot);
        self().store(softmax);
      }
#pragma unroll
      for (int j = 0; j < kHeadDimV / 2; ++j) asm volatile("" : "=f"(o[j]));  // ends the stored o's life (L11)
    }
  }

  // One step over the key tiles of a query block.
  struct Step {
    int n;                    // the key tile of s; if block-sparse, its number among visible tiles
    bool accumulate = false;  // o holds p v of some key tile
    bool has_weights = true;  // p holds the weights of the tile before; false after a skipped tile
    unsigned k_slot, v_slot;
    float sums[2];  // of the weights
  };

  // Computes all key tiles but the first; p then belongs to the last one. Returns true if o holds a sum.
  __device__ __forceinline__ bool steps(const GroupKeys& keys) {
    const TileRange tiles = keys.tiles;
    Step step{tiles.end - 2};
    if constexpr (kAlwaysUpdatesMax) {
#pragma unroll 1
      for (; step.n >= tiles.begin; --step.n) {
        if (skips_tile(step, keys)) continue;
        issue_step(step);
        softmax_tile<1>(keys, step.n, step.k_slot, o_scale);
        const int tile = next_tile.at(step.n).n();
        next_tile.pop(smem, step.k_slot);
        release_k(keys, step.n, step.k_slot);
        drop(tile);
        finish_pv(step.v_slot);
        pack();
        rescale();
      }
    } else {
      // Below the tile of the last key that all rows see, every row has seen a key. If block-sparse, this is decided
      // for each tile.
      const bool any_unmasked = !kBlockSparse && keys.unmasked.begin < min(keys.unmasked.end, tiles.end);
      const int upper_begin = any_unmasked ? max(tiles.begin, keys.last_common) : tiles.begin;
#pragma unroll 1
      while (step.n >= tiles.begin) {
        // Tiles from upper_begin on cross the mask's right bound. Unmasked tiles follow, then tiles across its left
        // bound. stale_steps returns false if a step must be finished here. If block-sparse, it returns true early, at
        // a tile for the other loop. The unmasked loop comes first, where NVRTC computes descriptors in fewer
        // instructions (L52).
        const bool upper = !kBlockSparse && step.n >= upper_begin;
        if ((upper || stale_steps<true>(step, keys, kBlockSparse ? tiles.begin : keys.unmasked.begin)) &&
            stale_steps<false>(step, keys, upper ? upper_begin : tiles.begin)) {
          continue;
        }
        bool again[2];
        // Summed again, as the sums would hold registers. With dropout they are held, because s has lost the dropped
        // weights.
        if constexpr (kScoreMod && !kDropout) Softmax::sum_up(s, step.sums);
        if (softmax.scale_down(s, step.sums, again, o_scale)) recompute_weights(step, keys, again);
        else softmax.add(step.sums);
        const int tile = smem.tile(step.n, step.k_slot).n();
        release_k(keys, step.n, step.k_slot);
        drop(tile);
        pack();
        rescale();
        --step.n;
      }
    }
    return step.accumulate;
  }

  // Computes steps down to tile `begin`. Returns false, with a step unfinished, if weights left the range or peaked
  // (softmax.cuh). The maximum is stale, as in lazy rescaling: rows keep the maximum of their first visible tile while
  // their weights are in range. So a row's bits depend neither on other rows nor on the loop that computes a tile.
  // Unmasked tiles have an instance of their own, in which nothing else runs (L28). It begins after the first key that
  // all rows see.
  template <bool kUnmasked>
  __device__ __forceinline__ bool stale_steps(Step& step, const GroupKeys& keys, int begin) {
    // True if rows may see their first key in these tiles. Elsewhere this happens only after scores that weighed
    // nothing; the row's weights are then recomputed.
    constexpr bool kMayBeginRows = !kUnmasked || (kMaskMod && !kBlockSparse) || kScoreModMayMask;
#pragma unroll 1
    for (; step.n >= begin; --step.n) {
      if constexpr (kBlockSparse) {
        const bool unmasked = is_unmasked(next_tile.at(step.n), keys);
        if (kUnmasked != (has_begun && unmasked)) return true;
        has_begun |= unmasked;
      }
      if (!kUnmasked && skips_tile(step, keys)) continue;
      issue_step(step);
      // Read here, so that it holds no registers over the wait (L31).
      const QueryWork work = kUnmasked && !kHasMods ? QueryWork() : smem.work(i);
      const auto rows = kUnmasked && !kHasMods ? decltype(lane_queries(work))() : lane_queries(work);
      const TileMods tile_mods(params, work);
      const auto at = next_tile.at(step.n);
      const int tile = at.n();
      const auto mod_tile = tile_mods.tile(rows, tile * kBlockK, softmax.taken_off<kMayBeginRows>());
      next_tile.pop(smem, step.k_slot);
      wgmma_wait<1>(s);
      Score{params.problem.score}.apply(s);
      tile_mods.apply(mod_tile, s, (kUnmasked && kBlockSparse) || at.is_full(group));
      if constexpr (!kUnmasked) {
        if (tile >= keys.unmasked.end) mask(work).apply_end(s, rows, tile * kBlockK, fresh_thread() % 4);
        if (tile < keys.unmasked.begin) mask(work).apply_begin(s, rows, tile * kBlockK, fresh_thread() % 4);
      }
      missing_pages(step.k_slot).apply(s, fresh_thread() % 4);
      if constexpr (kMayBeginRows && kScoreMod) softmax.update_max_of_exponents(s);
      else if constexpr (kMayBeginRows) softmax.update_max_if_unseen(s, scale_log2());
      else if constexpr (kScoreMod) softmax.put_out_of_range(s);
      softmax.exponentiate<kScoreMod>(s, scale_log2(), step.sums);
      const bool again = softmax.out_of_range(0, step.sums[0]) | softmax.out_of_range(1, step.sums[1]);
      const bool leaves = __any_sync(0xffffffffu, again);
      if (!leaves) {
        softmax.add(step.sums);
        release_k(keys, step.n, step.k_slot);
      }
      finish_pv(step.v_slot);  // also in warps that leave: compute-sanitizer needs one common wait (L41)
      if constexpr (kDropout) tile_mods.drop(s, rows, tile);
      pack();
      if (leaves) return false;
    }
    return true;
  }

  // Issues s = q kᵀ of the next key tile and o += p v of the one before.
  __device__ __forceinline__ void issue_step(Step& step) {
    wait_issue();
    step.k_slot = issue_next_qk();
    step.v_slot = issue_next_pv(step.accumulate);
    step.accumulate = step.has_weights = true;
    pass_issue();
  }

  // Computes the weights of the first key tile.
  template <int kPending>
  __device__ __forceinline__ void softmax_first_tile(GroupKeys& keys, unsigned k_slot) {
    keys.find_unmasked(params.problem, smem.work(i), group);
    softmax.setup();
    softmax_tile<kPending>(keys, keys.tiles.end - 1, k_slot, o_scale);
    const auto at = smem.tile(keys.tiles.end - 1, k_slot);
    const int tile = at.n();
    if constexpr (kBlockSparse) has_begun = is_unmasked(at, keys);
    next_tile.pop(smem, k_slot);
    release_k(keys, keys.tiles.end - 1, k_slot);
    drop(tile);
  }

  // Recomputes a step's weights in the rows `again`.
  __device__ __forceinline__ void recompute_weights(const Step& step, const GroupKeys& keys, const bool (&again)[2]) {
    const QueryWork work = smem.work(i);
    const auto rows = lane_queries(work);
    const TileMods tile_mods(params, work);
    const auto at = smem.tile(step.n, step.k_slot);
    const int tile = at.n();
    auto finish = [&](float (&fresh)[8], int piece) {
      const int key = tile * kBlockK + 16 * piece;
      Score{params.problem.score}.apply(fresh);
      tile_mods.apply(tile_mods.tile(rows, key), fresh, at.is_full(group));
      if (tile >= keys.unmasked.end) mask(work).apply_end(fresh, rows, key, fresh_thread() % 4);
      if (tile < keys.unmasked.begin) mask(work).apply_begin(fresh, rows, key, fresh_thread() % 4);
      missing_pages(step.k_slot).apply_piece(fresh, piece, fresh_thread() % 4);
    };
    recompute_tile_weights(s, softmax, step.sums, again, o_scale, finish, scale_log2(), q, q_smem(),
                           smem.kv + step.k_slot * kBytesSlot);
  }

  // Skips a key tile that is fully masked for this warpgroup; returns false if the tile must be computed. The last tile
  // is never skipped, as its p v runs with the next work tile. The step after it issues p v even if p is 0: a condition
  // there would make wgmma wait.
  __device__ __forceinline__ bool skips_tile(Step& step, const GroupKeys& keys) {
    if constexpr (kBlockSparse) {
      if (step.n == keys.tiles.begin || next_tile.at(step.n).is_visible(group)) return false;
      wait_issue();
      wait(ring);
      next_tile.pop(smem, ring.slot);
      release_k(keys, step.n, ring.advance().slot);
      if (step.has_weights) {
        const unsigned v_slot = issue_next_pv(step.accumulate);
        step.accumulate = true, step.has_weights = false;
        pass_issue();
        finish_pv(v_slot);
#pragma unroll
        for (unsigned& pair : p) pair = 0;
      } else {
        skip(), pass_issue();
      }
      return true;
    }
    return false;
  }

  // True if this warpgroup sees all of a tile, after which all of its rows have seen a key.
  template <class Tile>
  __device__ __forceinline__ bool is_unmasked(const Tile& tile, const GroupKeys& keys) const {
    return tile.is_full(group) && tile.n() >= keys.unmasked.begin && tile.n() < keys.unmasked.end;
  }

  __device__ __forceinline__ Derived& self() { return static_cast<Derived&>(*this); }

  // Ping-pong: warpgroups issue their products alternately (L27).
  __device__ __forceinline__ void wait_issue() const {
    if constexpr (kPingPong) bar_sync(kIssue + group, 256);
  }

  __device__ __forceinline__ void pass_issue() const {
    if constexpr (kPingPong) bar_arrive(kIssue + (group + 1) % kNumConsumers, 256);
  }

  // For a skipped step: all warpgroups must pass equally often.
  __device__ __forceinline__ void skip_issue() const { wait_issue(), pass_issue(); }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < kBlockK / 4; ++j) p[j] = pack2(s[2 * j], s[2 * j + 1]);
  }

  // Drops weights of key tile n, after they were summed.
  __device__ __forceinline__ void drop(int n) {
    if constexpr (kDropout) {
      const QueryWork work = smem.work(i);
      TileMods(params, work).drop(s, lane_queries(work), n);
    }
  }

  __device__ __forceinline__ void rescale() {
    if (!__any_sync(0xffffffffu, o_scale[0] != 1.0f | o_scale[1] != 1.0f)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_row(o, h, o_scale[h]);
  }

  __device__ __forceinline__ unsigned issue_next_pv(bool accumulate) {
    issue_ab<kBlockK, kHeadDimV>(o, p, wait(ring), kPanelBytesK, accumulate);
    return ring.advance().slot;
  }

  __device__ __forceinline__ void finish_pv(unsigned v_slot) {
    wgmma_wait<0>(o);
    release(v_slot);
  }
};
