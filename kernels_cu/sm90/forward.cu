// Forward on Hopper: out = softmax(mask(cap(scale q kᵀ))) v and its lse, for query blocks of many heads one after the
// other.
//
//   s = q kᵀ                 wgmma, both from shared memory
//   p = exp2(s c - shift)    sm90/softmax.cuh
//   o = o * o_scale + p v    wgmma, p from registers
//
// Roles    warpgroup 0: one warp copies k and v, others q (sm90/producer.cuh).
//          the others: 64 queries of the block each, all keys. A step issues s of the next key tile and p v of this
//          one, then the softmax of that s runs beside p v; the last p v of a block goes with the first s of the next
//          block, under which the block's rows are stored.
// Barriers tile_full   the producer has described a tile (or that there is none)
//          q_full      q has arrived            q_empty   every warp is done with it
//          kv_full     k or v has arrived       kv_empty  every warp is done with it
//          turn        (kPingPong) a warpgroup may issue its products: the other's softmax then runs beside them
#include "consumer.cuh"

constexpr int kTurnBarrier = 1;  // and following

using Weights = unsigned[kBlockK / 4];
using Output = float[kHeadDimV / 2];

constexpr int kOutColumns = 128 / kOutBytes;  // of a panel of out
constexpr int kPanelsOut = (kHeadDimV + kOutColumns - 1) / kOutColumns;

struct ForwardConsumer : Consumer {
  Weights p;
  Output o;
  float o_scale[2];

  using Consumer::Consumer;

  __device__ __forceinline__ void take_turn() const {
    if constexpr (kPingPong) bar_sync(kTurnBarrier + group, 256);
  }

  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kPingPong) bar_arrive(kTurnBarrier + (group + 1) % kNumConsumers, 256);
  }

  // The turn of a step that is skipped: all warpgroups take as many.
  __device__ __forceinline__ void pass_over() const { take_turn(), pass_turn(); }

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
    return advance();
  }

  __device__ __forceinline__ void end_output(unsigned v_slot) {
    wgmma_wait<0>();
    wgmma_pin(o);
    release(v_slot);
  }

  // One of the steps of a query block.
  struct Step {
    int n;                    // the key tile of s
    bool accumulate = false;  // o has the p v of a key tile
    unsigned k_slot, v_slot;
    float sums[2];  // of the weights
  };

  // s = q kᵀ of the next key tile and o += p v of the one before, begun.
  __device__ __forceinline__ void begin_step(Step& step) {
    take_turn();
    step.k_slot = begin_next_scores();
    step.v_slot = begin_next_output(step.accumulate);
    step.accumulate = true;
    pass_turn();
  }

  // Steps by the stale maximum down to key tile `begin`; false once weights are out of range, whose step is unfinished.
  template <bool kHideBefore>
  __device__ __forceinline__ bool stale_steps(Step& step, const KeyTiles& keys, int begin) {
    const ForwardParams& forward = params.forward;
#pragma unroll 1
    for (; step.n >= begin; --step.n) {
      begin_step(step);
      const int row = kHideBefore ? lane_row() : 0;  // why: read while the products run
      await_scores<1>();
      if constexpr (kHideBefore) Mask(forward).hide_before(s, row, step.n * kBlockK, fresh_thread() % 4);
      softmax.weigh(s, forward.scale_log2, step.sums);
      if (__any_sync(0xffffffffu, softmax.out_of_range(0, step.sums[0]) | softmax.out_of_range(1, step.sums[1]))) {
        wgmma_wait<0>();
        wgmma_pin(o);
        return false;
      }
      softmax.add(step.sums);
      end_scores(keys, step.n, step.k_slot);
      end_output(step.v_slot);
      pack();
    }
    return true;
  }

  // All key tiles of a query block but the first; p is then that of the last. Whether o has something.
  __device__ __forceinline__ bool steps(const KeyTiles& keys) {
    const ForwardParams& forward = params.forward;
    Step step{keys.end - 2};
    // why: after a clear tile every row has a maximum; the tiles cut at the left then need none of their own.
    const bool stale = !kSoftcap && keys.clear_begin < min(keys.clear_end, keys.end);
    const int exact_end = stale ? max(keys.begin, keys.clear_end) : keys.begin;
#pragma unroll 1
    for (; step.n >= exact_end; --step.n) {
      begin_step(step);
      weigh<1>(keys, step.n, o_scale);
      end_scores(keys, step.n, step.k_slot);
      end_output(step.v_slot);
      pack();
      rescale();
    }
    if constexpr (!kSoftcap) {
      // why: the loop over clear tiles stands alone: it is longer than the first instruction cache.
      const int clear_begin = max(keys.begin, keys.clear_begin);
#pragma unroll 1
      while (!stale_steps<false>(step, keys, clear_begin) || !stale_steps<true>(step, keys, keys.begin)) {
        weigh_again(s, softmax, step.sums, o_scale, forward, lane_row(), step.n * kBlockK, q, q_smem(),
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

  // Where the warp stages panel n of its rows of out, of those that are on their way at a time.
  __device__ __forceinline__ unsigned out_smem(int n) const {
    return smem.out + ((group * 4 + warp) * kOutPanels + n) * kWarpPanelBytes;
  }

  // The warp's rows of o, normalised, to shared memory: panels [first, last).
  __device__ __forceinline__ void stage_rows(int first, int last) const {
    using Panel = Swizzle<8>;
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int column = first * kOutColumns; column < min(last * kOutColumns, kHeadDimV); column += 16) {
      const int j = column / 8;
      const unsigned panel = out_smem(column / kOutColumns - first);
      if constexpr (kOutBytes == 2) {
        auto pair = [&](int j, int h) {  // columns 8 j + 2 (lane % 4) and the next of row h
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

  // The warp's rows of the tile before this one: out, by the copy engine from shared memory, and lse.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const Tile of = smem.tile(i - 1);
    float lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) softmax.finish(h, o_scale[h], lse[h]);
    if (__any_sync(0xffffffffu, o_scale[0] == 0.0f || o_scale[1] == 0.0f)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (o_scale[h] == 0.0f) clear_row(o, h);
      }
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
          tma_store_4d(&params.out, out_smem(n - first), n * kOutColumns, of.row_begin + block_row(), of.head,
                       of.batch);
        }
        bulk_commit();
      }
    }
    // why: last, because the fence waits for all that was stored before it.
    if (params.forward.lse != nullptr) store_lse(of, lse);
  }

  // The first key tile's weights.
  template <int kPending>
  __device__ __forceinline__ void weigh_first(KeyTiles& keys, unsigned k_slot) {
    keys.find_clear(params.forward, smem.tile(i), group);
    softmax.setup();
    weigh<kPending>(keys, keys.end - 1, o_scale);
    end_scores(keys, keys.end - 1, k_slot);
  }

  __device__ __forceinline__ void run() {
    if (kPingPong && group == kNumConsumers - 1) bar_arrive(kTurnBarrier, 256);
    smem.await_tile(0);
    KeyTiles keys(params.forward, smem.tile(0), group, true);
    bool skips_v = keys.skips_first;  // of a key tile that is skipped
    unsigned k_slot = begin_first_scores(keys);
    if constexpr (kNextScoresFirst) weigh_first<0>(keys, k_slot);
#pragma unroll 1
    for (;;) {
      if constexpr (!kNextScoresFirst) weigh_first<0>(keys, k_slot);
      if (skips_v) skip();
      if (keys.skips_first) pass_over();
      pack();
      const bool accumulate = steps(keys);

      // The last p v, with the next tile's first s.
      smem.await_tile(++i);
      const Tile next = smem.tile(i);
      const bool skips_last = keys.skips_last;
      if (skips_last) skip(), pass_over();
      if (next.row_begin == kNoTile) {
        begin_next_output(accumulate);
        wgmma_wait<0>();
        wgmma_pin(o);
        store(softmax);
        if (leads) bulk_wait_read<0>();
        break;
      }
      take_turn();
      if constexpr (kNextScoresFirst) {
        keys = KeyTiles(params.forward, next, group, !skips_last);
        if (keys.skips_first) skip();
        skips_v = skips_last || keys.skips_first;
        RingPosition k = ring;
        ring.advance();
        RingPosition v = ring;
        ring.advance();
        if (skips_v) swap(k, v);  // why: v of the key tile that is skipped lies between what was and what comes
        await_query();
        begin_scores(s, q, smem.q_rows(i, group), await(k));
        begin_sum<kBlockK, kHeadDimV>(o, p, await(v), kPanelBytesK, accumulate);
        k_slot = k.slot;
        const unsigned v_slot = v.slot;
        pass_turn();
        const Softmax done = softmax;
        weigh_first<1>(keys, k_slot);
        end_output(v_slot);
        store(done);
      } else {
        const unsigned v_slot = begin_next_output(accumulate);
        if (skips_last) skip();
        keys = KeyTiles(params.forward, next, group, true);
        skips_v = keys.skips_first;
        k_slot = begin_first_scores(keys);
        pass_turn();
        wgmma_wait<1>();
        wgmma_pin(o);
        release(v_slot);
        store(softmax);
      }
#pragma unroll
      for (int j = 0; j < kHeadDimV / 2; ++j) asm volatile("" : "=f"(o[j]));  // why: nothing of it is kept
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ TiledParams params) {
  run_roles<ForwardConsumer>(params);
}
