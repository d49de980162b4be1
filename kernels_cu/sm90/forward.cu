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
//          q_full      q has arrived            q_empty   every warp has its last s of the tile
//          kv_full     k or v has arrived       kv_empty  every warp is done with it
//          turn        (kPingPong) a warpgroup may issue its products: the other's softmax then runs beside them
#include "consumer.cuh"

constexpr int kTurnBarrier = 1;  // and following

using Weights = unsigned[kBlockK / 4];
using Output = float[kHeadDimV / 2];

constexpr int kOutColumns = 128 / kOutBytes;  // of a panel of out
constexpr int kPanelsOut = (kHeadDimV + kOutColumns - 1) / kOutColumns;

// o = p v, or o += p v, begun.
__device__ __forceinline__ void begin_output(Output& o, const Weights& p, unsigned v_smem, bool accumulate) {
  const unsigned v = wgmma_low(v_smem, kPanelBytesK);
  wgmma_fence();
#pragma unroll
  for (int kk = 0; kk < kBlockK / 16; ++kk) {
    Wgmma<kHeadDimV>::rs<kIsFloat16, true>(o, p + 4 * kk, wgmma_descriptor(v + kk * 128), kk > 0 || accumulate);
  }
  wgmma_commit();
}

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
    begin_output(o, p, await(), accumulate);
    return advance();
  }

  __device__ __forceinline__ void end_output(unsigned v_slot) {
    wgmma_wait<0>();
    wgmma_pin(o);
    release(v_slot);
  }

  // s = q kᵀ of the next key tile and o += p v of the one before, begun.
  __device__ __forceinline__ void begin_step(bool accumulate, unsigned& k_slot, unsigned& v_slot) {
    take_turn();
    k_slot = begin_next_scores();
    v_slot = begin_next_output(accumulate);
    pass_turn();
  }

  // All key tiles of a query block but the first; p is then that of the last. The loop over those that need neither
  // mask nor cap stands alone. why: it is longer than the first instruction cache, and nothing may lie in its way.
  __device__ __forceinline__ bool steps(const KeyTiles& keys) {
    const ForwardParams& forward = params.forward;
    bool accumulate = false;
    int n = keys.end - 2;
    int plain_end = kSoftcap ? keys.begin : max(keys.begin, keys.clear_end);
    const int plain_begin = max(keys.begin, keys.clear_begin);
    unsigned k_slot, v_slot;
    float sums[2];
#pragma unroll 1
    for (;;) {
#pragma unroll 1
      for (; n >= plain_end; --n) {
        begin_step(accumulate, k_slot, v_slot);
        weigh<1>(keys, n, o_scale);
        end_scores(keys, n, k_slot);
        end_output(v_slot);
        pack();
        rescale();
        accumulate = true;
      }
      if constexpr (kSoftcap) return accumulate;
      bool again = false;
#pragma unroll 1
      for (; n >= plain_begin; --n) {
        begin_step(accumulate, k_slot, v_slot);
        await_scores<1>();
        accumulate = true;
        softmax.weigh(s, forward.scale_log2, sums);
        if (__any_sync(0xffffffffu, softmax.out_of_range(0, sums[0]) | softmax.out_of_range(1, sums[1]))) {
          wgmma_wait<0>();
          wgmma_pin(o);
          again = true;
          break;
        }
        softmax.add(sums);
        end_scores(keys, n, k_slot);
        end_output(v_slot);
        pack();
      }
      if (again) {
        weigh_again(s, softmax, sums, o_scale, forward.scale_log2, q_smem(), smem.kv + k_slot * kBytesSlot);
        end_scores(keys, n, k_slot);
        release(v_slot);
        pack();
        rescale();
        --n;
      } else if (n >= keys.begin) {
        plain_end = keys.begin;
      } else {
        return accumulate;
      }
    }
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
      if (leads) bulk_wait_read();
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
  __device__ __forceinline__ void weigh_first(const KeyTiles& keys, unsigned k_slot) {
    softmax.setup();
    weigh<kPending>(keys, keys.end - 1, o_scale);
    end_scores(keys, keys.end - 1, k_slot);
  }

  __device__ __forceinline__ void run() {
    if (kPingPong && group == kNumConsumers - 1) bar_arrive(kTurnBarrier, 256);
    smem.await_tile(0);
    KeyTiles keys(params.forward, smem.tile(0), group);
    unsigned k_slot = begin_first_scores(keys);
    if constexpr (kNextScoresFirst) weigh_first<0>(keys, k_slot);
#pragma unroll 1
    for (;;) {
      if constexpr (!kNextScoresFirst) weigh_first<0>(keys, k_slot);
      if (keys.skipped) skip(), take_turn(), pass_turn();
      pack();
      const bool accumulate = steps(keys);

      // The last p v, with the next tile's first s.
      smem.await_tile(++i);
      const Tile next = smem.tile(i);
      if (next.row_begin == kNoTile) {
        begin_next_output(accumulate);
        wgmma_wait<0>();
        wgmma_pin(o);
        store(softmax);
        if (leads) bulk_wait_read();
        break;
      }
      take_turn();
      keys = KeyTiles(params.forward, next, group);
      if constexpr (kNextScoresFirst) {
        k_slot = begin_first_scores(keys);
        const unsigned v_slot = begin_next_output(accumulate);
        pass_turn();
        const Softmax done = softmax;
        weigh_first<1>(keys, k_slot);
        end_output(v_slot);
        store(done);
      } else {
        const unsigned v_slot = begin_next_output(accumulate);
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
