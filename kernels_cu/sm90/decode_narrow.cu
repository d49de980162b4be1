// As decode.cu, for query blocks of at most 16 rows: the warps share the keys of each tile, and each of them has all rows.
//
//   s = q kᵀ, o += p v          mma.sync, over a warp's keys: a quarter of each key tile
//   out = sum w o / sum w       over the warps, then over the splits, w = exp(lse - the largest of them)
//
// Roles    As in decode.cu.
// Barriers As in decode.cu.
// why not by wgmma: a product has 64 rows, and weights of rows that do not exist take as long as those of others.
#include "decode_output.cuh"

constexpr int kWarpKeys = kBlockK / 4;  // of a tile

struct NarrowConsumer : Role {
  const int warp;
  unsigned i = 0;
  RingPosition ring;
  Softmax softmax;
  float o[kHeadDimV / 2];

  __device__ __forceinline__ NarrowConsumer(const Role& role, int warp_idx) : Role(role), warp(warp_idx) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;; ++i) {
      smem.await_work(i);
      // why: the host launches as many blocks as there may be work for.
      if (!smem.work(i).exists()) break;
      const TileRange tiles = smem.work(i).keys;
      mbarrier_wait(smem.q_full(i, 0), i / kQStages & 1);
      softmax.setup();
#pragma unroll
      for (int j = 0; j < kHeadDimV / 2; ++j) o[j] = 0.0f;
      const Seen seen(params, smem.work(i));
#pragma unroll 1
      for (int n = tiles.end - 1; n >= tiles.begin; --n) step(seen, n);
      __syncwarp();
      if (leads) mbarrier_arrive(smem.q_empty(i, 0));
      store(smem.work(i));
    }
  }

  // What this lane's rows see of a piece of work.
  struct Seen {
    const AnyLaneQueries rows;
    const Mask mask;
    const Range common;  // the keys that all rows of the block see

    __device__ __forceinline__ Seen(const DecodeParams& params, const QueryWork& work)
        : rows(work.lane_queries(params.problem, fresh_thread() % 32 / 4)),
          mask(work.sequence(params.problem).mask()),
          common(common_keys(work.queries(params.problem, 0, kBlockQ), mask)) {}

    __device__ __forceinline__ static Range common_keys(const Range& queries, const Mask& mask) {
      return mask.full_range(queries.begin, smaller(queries.end, mask.seqlen_q));
    }
  };

  // Takes the warp's keys of tile n.
  __device__ __forceinline__ void step(const Seen& seen, int n) {
    using Panel = Swizzle<8>;
    const int lane = fresh_thread() % 32;
    const unsigned own = warp * kWarpKeys * 128;  // bytes before the warp's keys in a panel
    float s[kWarpKeys / 2] = {};
    const RingPosition k = ring.advance();
    mbarrier_wait(smem.kv_full + 8 * k.slot, k.parity);
    const unsigned q_rows = smem.q_rows(i, 0) + Panel::offset(lane % 16, lane / 16);
    const unsigned k_rows = smem.kv + k.slot * kBytesSlot + own + Panel::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
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
    weigh(s, seen, n, k.slot);
    __syncwarp();  // why: all lanes have loaded k
    if (leads) mbarrier_arrive(smem.kv_empty + 8 * k.slot);

    const RingPosition v = ring.advance();
    mbarrier_wait(smem.kv_full + 8 * v.slot, v.parity);
    const unsigned v_rows = smem.kv + v.slot * kBytesSlot + own + Panel::offset(lane % 16, lane / 16);
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
    __syncwarp();
    if (leads) mbarrier_arrive(smem.kv_empty + 8 * v.slot);
  }

  // Scores of the warp's keys of tile n become weights, and o is multiplied by what they ask for.
  __device__ __forceinline__ void weigh(float (&s)[kWarpKeys / 2], const Seen& seen, int n, unsigned k_slot) {
    const int lane = fresh_thread() % 32, key = n * kBlockK + warp * kWarpKeys;
    Score{params.problem.score}.apply(s);
    if (key + kWarpKeys > seen.common.end) seen.mask.hide_after(s, seen.rows, key, lane % 4);
    if (key < seen.common.begin) seen.mask.hide_before(s, seen.rows, key, lane % 4);
#pragma unroll
    for (int j = 0; j < kWarpKeys / 16; ++j) {
      AbsentKeys{params, smem, k_slot}.hide_piece(reinterpret_cast<float(&)[8]>(s[8 * j]), warp * (kWarpKeys / 16) + j,
                                                  lane % 4);
    }
    const float scale_log2 = params.problem.score.scale_log2;
    float o_scale[2], sums[2];
    softmax.raise(s, scale_log2, o_scale);
    softmax.weigh(s, scale_log2, sums);
    softmax.add(sums);
    if (!__any_sync(0xffffffffu, o_scale[0] != 1.0f | o_scale[1] != 1.0f)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) scale_row(o, h, o_scale[h]);
  }

  // Stores the rows of a piece of work. They are merged twice, by the same code: those of the warps, which gives the rows of
  // a split, and by the block of threads whose split ends last those of the splits, in their order.
  __device__ __forceinline__ void store(const QueryWork& work) const {
    const DecodeOutput output{params};
    bar_sync(kMerge, 128);  // why: the rows of the work before this one were read
    put_rows(work);
    bar_sync(kMerge, 128);
    const int shared = output.shared_rows(work);
    int num_rows = output.num_rows(work);
    // why one loop: L50.
#pragma unroll 1
    for (bool of_splits = false;; of_splits = true) {
#pragma unroll 1
      for (int first = 0; first < num_rows; first += kPassRows) {
        const int row = first + thread_row(), column = thread_column();
        // Of a warp's rows, or of what was fetched: the bytes of a row, how many rows follow each other, and which of
        // them this thread's is.
        const int row_bytes = of_splits ? 4 * kHeadDimV : 4 * kNarrowColumns, together = of_splits ? kPassRows : 16;
        const int at = of_splits ? thread_row() : row, num_states = of_splits ? work.num_splits : 4;
        const bool exists = thread_row() < kPassRows && row < num_rows;
        Merged merged;
#pragma unroll 1
        for (int n = 0; n < num_states; n += 4) {
          if (of_splits && n % kFetched == 0) fetch(work, first, shared, n);
          const int begin = n % kFetched * together + at;
          const unsigned rows = smem.out + begin * row_bytes + 4 * column, lses = lse_smem() + 4 * begin;
          if (exists) merged.add(rows, together * row_bytes, lses, 4 * together);
        }
        if (!exists) continue;
        const float4 x = merged.out();
        if (!of_splits && row < shared) {
          const long long place = output.partial_row(work, row);
          if (column == 0) params.partial_lse[place] = merged.lse();
          *reinterpret_cast<float4*>(params.partial_out + place * kHeadDimV + column) = x;
        } else if (of_splits || work.split == 0) {
          if (column == 0) output.store_lse(work, row, merged.lse());
          char* const out = output.out_row(work, row);
          if (out != nullptr && column < params.problem.head_dim_v) output.store_four(out, column, x);
        }
      }
      if (of_splits || !output.is_last_split(work)) break;
      num_rows = shared;
    }
  }

 private:
  static constexpr int kChunks = kHeadDimV / 4;       // of four columns, in a row
  static constexpr int kPassRows = 128 / kChunks;     // rows that the threads have together
  static constexpr int kFetched = 64 / kPassRows / 4 * 4;  // splits of so many rows for which there is room

  // The thread's row, of those of a pass, and its first column.
  __device__ __forceinline__ static int thread_row() { return fresh_thread() % 128 / kChunks; }
  __device__ __forceinline__ static int thread_column() { return fresh_thread() % 128 % kChunks * 4; }

  // Behind the rows, lse of each of them.
  __device__ __forceinline__ unsigned lse_smem() const { return smem.out + 4 * 4 * 16 * kNarrowColumns; }

  // What is known of four columns of a row, from states of it: rows of out with their lse.
  struct Merged {
    float most = -infinity(), sum = 0.0f;
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};

    // Adds four states that lie in shared memory so many bytes apart.
    __device__ __forceinline__ void add(unsigned rows, unsigned step, unsigned lses, unsigned lse_step) {
      float lse[4], next = most;
      float4 x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        lse[n] = __uint_as_float(ld_shared_u32(lses + n * lse_step)), x[n] = ld_shared_v4_f32(rows + n * step);
        next = fmaxf(next, lse[n]);
      }
      const float scale = next == most ? 1.0f : exp2_approx((most - next) * (1.0f / kLn2));
      total = {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
      sum *= scale, most = next;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (lse[n] == -infinity()) continue;  // why not a weight of 0: x may be NaN
        const float weight = exp2_approx((lse[n] - most) * (1.0f / kLn2));
        total.x += weight * x[n].x, total.y += weight * x[n].y, total.z += weight * x[n].z;
        total.w += weight * x[n].w, sum += weight;
      }
    }

    __device__ __forceinline__ float4 out() const {
      const float scale = sum == 0.0f ? 0.0f : rcp_approx(sum);
      return {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
    }
    __device__ __forceinline__ float lse() const { return sum == 0.0f ? -infinity() : most + log2_approx(sum) * kLn2; }
  };

  // Puts the warp's rows, and their lse, where all warps read them.
  __device__ __forceinline__ void put_rows(const QueryWork& work) const {
    const int lane = fresh_thread() % 32;
    const auto rows = work.lane_queries(params.problem, lane / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float scale, lse;
      softmax.finish(h, scale, lse);
      const int row = 16 * warp + lane / 4 + 8 * h;
      if (lane % 4 == 0) {
        st_shared_u32(lse_smem() + 4 * row, __float_as_uint(rows[h] < work.seqlen_q ? lse : -infinity()));
      }
      const unsigned to = smem.out + 4 * (row * kNarrowColumns + lane % 4 * 2);
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        st_shared_v2(to + 32 * j, __float_as_uint(o[4 * j + 2 * h] * scale), __float_as_uint(o[4 * j + 2 * h + 1] * scale));
      }
    }
  }

  // Gets the rows from `first` on of kFetched splits; those that do not exist see nothing. Each thread copies the columns
  // that it merges. why by cp.async: all copies are on their way together, and one instruction makes them.
  __device__ __forceinline__ void fetch(const QueryWork& work, int first, int end, int begin) const {
    const long long of_split = params.partial_rows, place = (work.first_slot + begin) * of_split + first;
    const int row = thread_row(), count = min(work.num_splits - begin, kFetched);
    bar_sync(kMerge, 128);  // why: lse of the splits before these were read
    if (row < kPassRows && first + row < end) {
      const float* from = params.partial_out + (place + row) * kHeadDimV + thread_column();
      unsigned to = smem.out + 4 * (thread_column() + kHeadDimV * row);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        cp_async_16(to, from);
        to += 4 * kPassRows * kHeadDimV, from += of_split * kHeadDimV;
      }
    }
    const int at = fresh_thread() % 128, split = at / kPassRows, of_row = at % kPassRows;
    if (split < kFetched) {
      const bool exists = split < count && first + of_row < end;
      const float lse = exists ? __ldcg(params.partial_lse + place + split * of_split + of_row) : -infinity();
      st_shared_u32(lse_smem() + 4 * at, __float_as_uint(lse));
    }
    cp_async_commit();
    cp_async_wait<0>();
    bar_sync(kMerge, 128);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ DecodeParams params) {
  run_roles<NarrowConsumer>(params);
}
