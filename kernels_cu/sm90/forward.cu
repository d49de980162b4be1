// Forward on Hopper: out = softmax(mask(score(q kᵀ))) v and its lse, for query blocks of any heads one after the other.
//
//   s = q kᵀ                 wgmma, q from registers as far as it is there
//   p = exp2(s c - shift)    sm90/softmax.cuh
//   o = o * o_scale + p v    wgmma, p from registers
//
// Roles    warpgroup 0  One warp copies k and v, others copy q (sm90/producer.cuh).
//          the others   Each owns 64 queries of the block and all keys. A step issues s of the next key tile and p v of
//                       this one; the softmax of that s then runs beside p v. The last p v of a block goes with the
//                       first s of the next block, under which the block's rows are stored.
// Barriers work_full   the producer has described work, or that there is no more
//          q_full      q has arrived            q_empty   every warp is done with it
//          kv_full     k or v has arrived       kv_empty  every warp is done with it
//          kIssue      (kPingPong) a warpgroup may issue its products; the softmax of the other runs beside them
#include "consumer.cuh"

enum NamedBarrier { kIssue = 1 };  // one for each warpgroup, from this number on

using Weights = unsigned[kBlockK / 4];
using Output = float[kHeadDimV / 2];

constexpr int kOutColumns = 128 / kOutBytes;  // of a panel of out
constexpr int kPanelsOut = (kHeadDimV + kOutColumns - 1) / kOutColumns;

struct ForwardConsumer : Consumer {
  Weights p;
  Output o;
  float o_scale[2];

  using Consumer::Consumer;

  // Ping-pong: warpgroups issue their products alternately (L27).
  __device__ __forceinline__ void await_issue() const {
    if constexpr (kPingPong) bar_sync(kIssue + group, 256);
  }

  __device__ __forceinline__ void pass_issue() const {
    if constexpr (kPingPong) bar_arrive(kIssue + (group + 1) % kNumConsumers, 256);
  }

  // For a step that is skipped. why: all warpgroups must pass as often.
  __device__ __forceinline__ void skip_issue() const { await_issue(), pass_issue(); }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < kBlockK / 4; ++j) p[j] = pack2(s[2 * j], s[2 * j + 1]);
  }

  __device__ __forceinline__ void rescale() {
    if (!__any_sync(0xffffffffu, o_scale[0] != 1.0f | o_scale[1] != 1.0f)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_row(o, h, o_scale[h]);
  }

  __device__ __forceinline__ unsigned begin_next_output(bool accumulate) {
    begin_sum<kBlockK, kHeadDimV>(o, p, await(ring), kPanelBytesK, accumulate);
    return ring.advance().slot;
  }

  __device__ __forceinline__ void end_output(unsigned v_slot) {
    wgmma_wait<0>(o);
    release(v_slot);
  }

  // One of the steps of a query block.
  struct Step {
    int n;                    // the key tile of s
    bool accumulate = false;  // o has the p v of a key tile
    unsigned k_slot, v_slot;
    float sums[2];  // of the weights
  };

  // Begins s = q kᵀ of the next key tile and o += p v of the one before.
  __device__ __forceinline__ void begin_step(Step& step) {
    await_issue();
    step.k_slot = begin_next_scores();
    step.v_slot = begin_next_output(step.accumulate);
    step.accumulate = true;
    pass_issue();
  }

  // Takes steps with the stale maximum down to tile `begin`; false if weights left the range, their step unfinished.
  template <bool kHideBefore>
  __device__ __forceinline__ bool stale_steps(Step& step, const GroupKeys& keys, int begin) {
#pragma unroll 1
    for (; step.n >= begin; --step.n) {
      begin_step(step);
      const QueryWork work = kHideBefore ? smem.work(i) : QueryWork();  // why here: L31
      const int row = kHideBefore ? lane_row(work) : 0;
      wgmma_wait<1>(s);
      if constexpr (kHideBefore) mask(work).hide_before(s, row, step.n * kBlockK, fresh_thread() % 4);
      absent_keys(step.k_slot).hide(s, fresh_thread() % 4);
      softmax.weigh(s, scale_log2(), step.sums);
      if (__any_sync(0xffffffffu, softmax.out_of_range(0, step.sums[0]) | softmax.out_of_range(1, step.sums[1]))) {
        wgmma_wait<0>(o);
        return false;
      }
      softmax.add(step.sums);
      end_scores(keys, step.n, step.k_slot);
      end_output(step.v_slot);
      pack();
    }
    return true;
  }

  // Takes the steps of all key tiles but the first; p is then that of the last. The result tells whether o holds a sum.
  __device__ __forceinline__ bool steps(const GroupKeys& keys) {
    const TileRange tiles = keys.tiles;
    Step step{tiles.end - 2};
    // why: after a clear tile every row has a maximum (L33).
    const bool stale = !Score::kAlwaysChanges && keys.clear.begin < min(keys.clear.end, tiles.end);
    const int exact_end = stale ? max(tiles.begin, keys.clear.end) : tiles.begin;
#pragma unroll 1
    for (; step.n >= exact_end; --step.n) {
      begin_step(step);
      weigh<1>(keys, step.n, step.k_slot, o_scale);
      end_scores(keys, step.n, step.k_slot);
      end_output(step.v_slot);
      pack();
      rescale();
    }
    if constexpr (!Score::kAlwaysChanges) {
      // why a loop of its own for clear tiles: L28.
      const int clear_begin = max(tiles.begin, keys.clear.begin);
#pragma unroll 1
      while (!stale_steps<false>(step, keys, clear_begin) || !stale_steps<true>(step, keys, tiles.begin)) {
        const QueryWork work = smem.work(i);
        const int row = lane_row(work), key = step.n * kBlockK;
        auto hide = [&](float (&fresh)[8], int piece) {
          mask(work).hide_before(fresh, row, key + 16 * piece, fresh_thread() % 4);
          absent_keys(step.k_slot).hide_piece(fresh, piece, fresh_thread() % 4);
        };
        weigh_again(s, softmax, step.sums, o_scale, hide, scale_log2(), q, q_smem(),
                    smem.kv + step.k_slot * kBytesSlot);
        end_scores(keys, step.n, step.k_slot);
        release(step.v_slot);
        pack();
        rescale();
        --step.n;
      }
    }
    return step.accumulate;
  }

  // Where the warp stages panel n of the panels of out that are on their way together.
  __device__ __forceinline__ unsigned out_smem(int n) const {
    return smem.out + ((group * 4 + warp) * kOutPanels + n) * kWarpPanelBytes;
  }

  // Stages the warp's rows of o, normalised, in shared memory: the panels first … last - 1.
  __device__ __forceinline__ void stage_rows(int first, int last) const {
    using Panel = Swizzle<8>;
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int column = first * kOutColumns; column < min(last * kOutColumns, kHeadDimV); column += 16) {
      const int j = column / 8;
      const unsigned panel = out_smem(column / kOutColumns - first);
      if constexpr (kOutBytes == 2) {
        auto pair = [&](int j, int h) {  // columns 8 j + 2 (lane % 4) and the next, of row h
          return pack2(o[4 * j + 2 * h] * o_scale[h], o[4 * j + 2 * h + 1] * o_scale[h]);
        };
        stmatrix_x4(Panel::advance(panel + Panel::offset(lane % 16, lane / 16), 0, column % kOutColumns / 8),
                    pair(j, 0), pair(j, 1), pair(j + 1, 0), pair(j + 1, 1));
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int h = n % 2, at = 4 * (j + n / 2) + 2 * h;
          st_shared_v2(panel + Panel::offset(lane / 4 + 8 * h, (j + n / 2) % 4 * 2 + lane % 4 / 2) + lane % 2 * 8,
                       __float_as_uint(o[at] * o_scale[h]), __float_as_uint(o[at + 1] * o_scale[h]));
        }
      }
    }
  }

  // Stores the warp's rows of the work before this one: out goes through shared memory by TMA (L21), lse goes directly.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const QueryWork work = smem.work(i - 1);
    const auto out_rows = work.sequence(params.problem).out_from(work.row_begin + block_row());
    float lse[2];
    finish(work, softmax, o_scale, lse);
    if (__any_sync(0xffffffffu, o_scale[0] == 0.0f || o_scale[1] == 0.0f)) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (o_scale[h] == 0.0f) clear_row(o, h);
    }
#pragma unroll
    for (int first = 0; first < kPanelsOut; first += kOutPanels) {
      const int last = min(first + kOutPanels, kPanelsOut);
      if (leads) bulk_wait_read<0>();
      __syncwarp();
      stage_rows(first, last);
      fence_proxy_async();
      __syncwarp();
      if (leads) {
#pragma unroll
        for (int n = first; n < last; ++n) {
          store_box(params.out_map, out_smem(n - first), n * kOutColumns, out_rows, work.head);
        }
        bulk_commit();
      }
    }
    // why last: L23.
    if (params.lse != nullptr) store_lse(work, lse);
  }

  // Makes the weights of the first key tile.
  template <int kPending>
  __device__ __forceinline__ void weigh_first(GroupKeys& keys, unsigned k_slot) {
    keys.find_clear(params.problem, smem.work(i), group);
    softmax.setup();
    weigh<kPending>(keys, keys.tiles.end - 1, k_slot, o_scale);
    end_scores(keys, keys.tiles.end - 1, k_slot);
  }

  __device__ __forceinline__ void run() {
    smem.await_work(0);
    if (kLengths && !smem.work(0).exists()) return;  // why: the host launches as many blocks as there may be work for
    if (kPingPong && group == kNumConsumers - 1) bar_arrive(kIssue, 256);
    GroupKeys keys(params.problem, smem.work(0), group, true);
    bool skips_v = keys.skips_first;  // v of a key tile that is skipped comes next in the ring
    unsigned k_slot = begin_first_scores(keys);
    if constexpr (kNextScoresFirst) weigh_first<0>(keys, k_slot);
#pragma unroll 1
    for (;;) {
      if constexpr (!kNextScoresFirst) weigh_first<0>(keys, k_slot);
      if (skips_v) skip();
      if (keys.skips_first) skip_issue();
      pack();
      const bool accumulate = steps(keys);

      // The last p v goes with the first s of the next work.
      smem.await_work(++i);
      const QueryWork next = smem.work(i);
      const bool skips_last = keys.skips_last;
      if (skips_last) skip(), skip_issue();
      if (!next.exists()) {  // why a copy of the end: L12
        begin_next_output(accumulate);
        wgmma_wait<0>(o);
        store(softmax);
        if (leads) bulk_wait_read<0>();
        break;
      }
      await_issue();
      if constexpr (kNextScoresFirst) {
        keys = GroupKeys(params.problem, next, group, !skips_last);
        if (keys.skips_first) skip();
        skips_v = skips_last || keys.skips_first;
        const RingPosition first = ring.advance(), second = ring.advance();
        // why: v of a skipped key tile stands before the next k in the ring.
        const RingPosition k = skips_v ? second : first, v = skips_v ? first : second;
        await_query();
        begin_scores(s, q, smem.q_rows(i, group), await(k));
        begin_sum<kBlockK, kHeadDimV>(o, p, await(v), kPanelBytesK, accumulate);
        k_slot = k.slot;
        const unsigned v_slot = v.slot;
        pass_issue();
        const Softmax done = softmax;
        weigh_first<1>(keys, k_slot);
        end_output(v_slot);
        store(done);
      } else {
        const unsigned v_slot = begin_next_output(accumulate);
        if (skips_last) skip();
        keys = GroupKeys(params.problem, next, group, true);
        skips_v = keys.skips_first;
        k_slot = begin_first_scores(keys);
        pass_issue();
        wgmma_wait<1>(o);
        release(v_slot);
        store(softmax);
      }
#pragma unroll
      for (int j = 0; j < kHeadDimV / 2; ++j) asm volatile("" : "=f"(o[j]));  // why: L11
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ TiledForwardParams params) {
  run_roles<ForwardConsumer>(params);
}
