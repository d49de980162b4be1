// As decode.cu, for query blocks of at most 16 rows: the warps split the keys of each tile, and each warp computes all
// rows.
//
//   s = q kᵀ, o += p v          mma.sync, over a warp's keys: a quarter of each key tile
//   out = Σ w·o / Σ w·sum       over the warps, then over the splits: common/row_states.cuh
//
// Roles    As in decode.cu.
// Barriers As in decode.cu.
// mma.sync is faster than wgmma here: a wgmma has 64 rows, and weights of absent rows take as long as any others.
#include "epilogue.cuh"
#include "roles.cuh"

constexpr int kWarpKeys = kBlockK / 4;  // keys of a warp in each tile

struct NarrowConsumer : Role {
  const int warp;
  unsigned i = 0;
  PipelineState ring;
  static constexpr unsigned kNoSlot = ~0u;
  unsigned held = kNoSlot;  // the slot of v to release next
  Softmax softmax;
  float o[kHeadDimV / 2];

  __device__ __forceinline__ NarrowConsumer(const Role& role, int warp_idx) : Role(role), warp(warp_idx) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++i) {
      smem.wait_work(i);
      // The grid covers the largest possible number of work tiles.
      if (!smem.work(i).exists()) break;
      const TileRange tiles = smem.work(i).keys;
      mbarrier_wait(smem.q_full(i, 0), i / kQStages & 1);
      softmax.setup();
#pragma unroll
      for (int j = 0; j < kHeadDimV / 2; ++j) o[j] = 0.0f;
      const Visible visible(params, smem.work(i));
#pragma unroll 1
      for (int n = tiles.end - 1; n >= tiles.begin; --n) step(visible, n);
      give_back_v();
      if (is_leader) mbarrier_arrive(smem.q_empty(i, 0));
      if constexpr (kOneTilePerBlock) {
        smem.wait_work(i + 1);
        if (smem.work(i + 1).row_begin != kNoWork) continue;  // this work tile is void (SchedulerWarp::run_ahead)
      }
      store(smem.work(i));
    }
  }

  // The mask and mods of this lane's rows in a work tile.
  struct Visible {
    const AnyLaneQueries rows;
    const ModHeads mod_heads;
    const Mask mask;
    const Range common;  // keys that all rows of the block see

    __device__ __forceinline__ Visible(const KernelParams& params, const QueryWork& work)
        : rows(work.lane_queries(params.problem, fresh_thread() % 32 / 4)),
          mod_heads(make_mod_heads(params, work)),
          mask(work.sequence(params.problem).mask()),
          common(common_keys(work.queries(params.problem, 0, kBlockQ), mask)) {}

    __device__ __forceinline__ static Range common_keys(const Range& queries, const Mask& mask) {
      return mask.full_range(queries.begin, const_min(queries.end, mask.seqlen_q));
    }
  };

  // Computes the warp's keys of tile n.
  __device__ __forceinline__ void step(const Visible& visible, int n) {
    using Panel = Swizzle<8>;
    const int lane = fresh_thread() % 32;
    const unsigned keys_offset = warp * kWarpKeys * 128;  // bytes before the warp's keys in a panel
    float s[kWarpKeys / 2] = {};
    const PipelineState k = ring.advance();
    mbarrier_wait(smem.kv_full + 8 * k.slot, k.parity);
    give_back_v();
    const unsigned q_rows = smem.q_rows(i, 0) + Panel::offset(lane % 16, lane / 16);
    const unsigned k_rows =
        smem.kv + k.slot * kBytesSlot + keys_offset + Panel::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int kk = 0; kk < kHeadDim / 16; ++kk) {
      unsigned a[4];
      ldmatrix_x4(a, Panel::advance(q_rows + kk / 4 * kPanelBytesQ, 0, kk % 4 * 2));
#pragma unroll
      for (int j = 0; j < kWarpKeys / 16; ++j) {
        unsigned b[4];
        ldmatrix_x4(b, Panel::advance(k_rows + kk / 4 * kPanelBytesK, 16 * j, kk % 4 * 2));
        mma_sync_m16n8k16<kIsFloat16>(s + 8 * j, a, b[0], b[1]);
        mma_sync_m16n8k16<kIsFloat16>(s + 8 * j + 4, a, b[2], b[3]);
      }
    }
    softmax_tile(s, visible, n, k.slot);
    __syncwarp();  // all lanes have loaded k
    if (is_leader) mbarrier_arrive(smem.kv_empty + 8 * k.slot);

    const PipelineState v = ring.advance();
    mbarrier_wait(smem.kv_full + 8 * v.slot, v.parity);
    const unsigned v_rows = smem.kv + v.slot * kBytesSlot + keys_offset + Panel::offset(lane % 16, lane / 16);
#pragma unroll
    for (int kk = 0; kk < kWarpKeys / 16; ++kk) {
      const float* const p = s + 8 * kk;
      const unsigned a[4] = {pack2(p[0], p[1]), pack2(p[2], p[3]), pack2(p[4], p[5]), pack2(p[6], p[7])};
#pragma unroll
      for (int j = 0; j < kHeadDimV / 16; ++j) {
        unsigned b[4];
        ldmatrix_x4_trans(b, Panel::advance(v_rows + j / 4 * kPanelBytesK, 16 * kk, j % 4 * 2));
        mma_sync_m16n8k16<kIsFloat16>(o + 8 * j, a, b[0], b[1]);
        mma_sync_m16n8k16<kIsFloat16>(o + 8 * j + 4, a, b[2], b[3]);
      }
    }
    held = v.slot;
  }

  // Releases the latest tile of v. This is late, since the compiler moves an arrival before products of the same basic
  // block, whose operands may still be loading (L40).
  __device__ __forceinline__ void give_back_v() {
    __syncwarp();
    if (is_leader && held != kNoSlot) mbarrier_arrive(smem.kv_empty + 8 * held);
    held = kNoSlot;
  }

  // Turns scores of the warp's keys of tile n into weights, and rescales o.
  __device__ __forceinline__ void softmax_tile(float (&s)[kWarpKeys / 2], const Visible& visible, int n,
                                               unsigned k_slot) {
    const int lane = fresh_thread() % 32, key = n * kBlockK + warp * kWarpKeys;
    Score{params.problem.score}.apply(s);
    apply_mods<kMaskMod, false>(visible.mod_heads, s, ModRows(visible.mod_heads, visible.rows, key, lane % 4));
    if (key + kWarpKeys > visible.common.end) visible.mask.apply_end(s, visible.rows, key, lane % 4);
    if (key < visible.common.begin) visible.mask.apply_begin(s, visible.rows, key, lane % 4);
#pragma unroll
    for (int j = 0; j < kWarpKeys / 16; ++j) {
      MissingPages{params, smem, k_slot}.apply_piece(reinterpret_cast<float (&)[8]>(s[8 * j]),
                                                     warp * (kWarpKeys / 16) + j, lane % 4);
    }
    const float scale_log2 = scale_log2_of(params.problem);
    float o_scale[2], sums[2];
    softmax.update_max(s, scale_log2, o_scale);
    softmax.exponentiate(s, scale_log2, sums);
    softmax.add(sums);
    if (!__any_sync(0xffffffffu, o_scale[0] != 1.0f | o_scale[1] != 1.0f)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_row(o, h, o_scale[h]);
  }

  // The rows of a work tile, with the interface that RowStates uses.
  struct Rows {
    const DecodeOutput output;
    const QueryWork work;
    const int num_rows = output.num_rows(work), shared_rows = output.shared_rows(work);
    const int split = work.split, num_splits = work.num_splits;

    __device__ __forceinline__ static void sync() { bar_sync(kMerge, 128); }
    __device__ __forceinline__ float* partial_out() const { return output.params.partial_out; }
    __device__ __forceinline__ float2* partial_sums() const { return output.params.partial_sums; }
    __device__ __forceinline__ long long partial_row(int of, int row) const {
      return output.partial_row(work, of, row);
    }
    __device__ __forceinline__ bool is_last_split() const { return output.is_last_split(work); }
    __device__ __forceinline__ void store(int row, int column, const MergedRow& merged) const {
      output.store(work, row, column, merged);
    }
  };

  __device__ __forceinline__ void store(const QueryWork& work) const {
    const Rows rows{{params}, work};
    const RowStates<Rows> states{rows, kOneTilePerBlock ? smem.kv : smem.out};
    const auto queries = work.lane_queries(params.problem, fresh_thread() % 32 / 4);
    Rows::sync();  // the previous work tile's rows, or the whole ring, are read
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(softmax.sum[h]);
      if (8 * h < rows.num_rows) states.put(warp, h, o, queries[h] < work.seqlen_q ? sum : 0.0f, softmax.shift[h]);
    }
    Rows::sync();
    states.store();
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, kMinBlocks)
    CUFLASH_KERNEL(const __grid_constant__ KernelParams params) {
  run_decode<NarrowConsumer>(params);
}
