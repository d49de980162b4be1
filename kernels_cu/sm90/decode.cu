// Forward on Hopper for few queries of each sequence: the query heads of a group are rows of one block, and blocks of
// threads share the keys of a sequence.
//
//   s, p, o                     as in forward.cu, over the key tiles of a split
//   out = sum w o / sum w       over the splits, w = exp(lse of the split - the largest of them)
//
// Roles    As in forward.cu, with one warpgroup that computes; q is copied by cp.async.
// Splits   Their rows of o and lse lie in memory. The block whose split ends last merges them, in their order.
// Barriers As in forward.cu, and kMerge instead of kIssue.
#include "../ptx/atomic.cuh"
#include "output.cuh"

constexpr int kMerge = 1;  // the warps that compute

struct DecodeConsumer : OutputConsumer<DecodeConsumer> {
  using OutputConsumer::OutputConsumer;

  // Calls visit(h, row of the block) for this lane's row in half h of the fragment, if it is one of these rows.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(Range rows, Visit visit) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = block_row() + fresh_thread() % 32 / 4 + 8 * h;
      if (row >= rows.begin && row < rows.end) visit(h, row);
    }
  }

  // Where a row of the block lies in out; null where out keeps what it holds there.
  __device__ __forceinline__ char* out_row(const QueryWork& work, int row) const {
    const int group = params.problem.heads_per_kv, query = (work.row_begin + row) / group;
    if (query >= work.seqlen_q && !params.problem.clears_unused) return nullptr;
    const int head = work.head * group + (work.row_begin + row) % group;
    return Place{work.q_batch, work.q_begin}.address(params.out, kOutBytes, head, query);
  }

  __device__ __forceinline__ void store_row_lse(const QueryWork& work, int row, float lse) const {
    const int group = params.problem.heads_per_kv, query = (work.row_begin + row) / group;
    const int head = work.head * group + (work.row_begin + row) % group;
    if (params.lse != nullptr) params.lse[work.sequence(params.problem).lse_offset(head) + query] = lse;
  }

  // Stores rows that no other split has a share in.
  __device__ __forceinline__ void store_rows(const QueryWork& work, Range rows, const float (&lse)[2]) const {
    const int lane = fresh_thread() % 32;
    for_each_row(rows, [&](int h, int row) {
      if (lane % 4 == 0) store_row_lse(work, row, lse[h]);
      char* const out = out_row(work, row);
      if (out == nullptr) return;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        if (column >= params.problem.head_dim_v) break;
        const float a = o[4 * j + 2 * h] * o_scale[h], b = o[4 * j + 2 * h + 1] * o_scale[h];
        if constexpr (kOutBytes == 2) *reinterpret_cast<unsigned*>(out + 2 * column) = pack2(a, b);
        else *reinterpret_cast<float2*>(out + 4 * column) = {a, b};
      }
    });
  }

  __device__ __forceinline__ void store_split(const QueryWork& work, Range rows, const float (&lse)[2]) const {
    const int lane = fresh_thread() % 32, dim = params.problem.head_dim_v;
    const long long first = static_cast<long long>(work.first_slot + work.split) * params.partial_rows;
    for_each_row(rows, [&](int h, int row) {
      if (lane % 4 == 0) params.partial_lse[first + row] = lse[h];
      float* const out = params.partial_out + (first + row) * dim;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        if (column >= dim) break;
        *reinterpret_cast<float2*>(out + column) = {o[4 * j + 2 * h] * o_scale[h], o[4 * j + 2 * h + 1] * o_scale[h]};
      }
    });
  }

  // Merges the splits of the block's rows, a part of which is this thread's, four columns at a time.
  __device__ __forceinline__ void merge(const QueryWork& work, int num_rows) const {
    constexpr int kTogether = kHeadDimV > 128 ? 4 : 8;  // splits that are loaded together. why fewer: registers
    const int dim = params.problem.head_dim_v, chunks = dim / 4;
    const long long of_split = params.partial_rows;
#pragma unroll 1
    for (int at = threadIdx.x % 128; at < num_rows * chunks; at += 128) {
      const int row = at / chunks, column = at % chunks * 4;
      const long long first = work.first_slot * of_split + row;
      float most = -infinity(), sum = 0.0f;
      float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
      for (int split = 0; split < work.num_splits; split += kTogether) {
        float lse[kTogether];
        float4 x[kTogether];
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const bool exists = split + n < work.num_splits;
          const long long from = first + (split + n) * of_split;
          lse[n] = exists ? __ldcg(params.partial_lse + from) : -infinity();
          x[n] = exists ? __ldcg(reinterpret_cast<const float4*>(params.partial_out + from * dim + column)) : float4{};
        }
        float next = most;
#pragma unroll
        for (int n = 0; n < kTogether; ++n) next = fmaxf(next, lse[n]);
        if (next == -infinity()) continue;
        const float scale = exp2_approx((most - next) * (1.0f / kLn2));
        total.x *= scale, total.y *= scale, total.z *= scale, total.w *= scale, sum *= scale, most = next;
#pragma unroll
        for (int n = 0; n < kTogether; ++n) {
          const float w = exp2_approx((lse[n] - most) * (1.0f / kLn2));
          total.x += w * x[n].x, total.y += w * x[n].y, total.z += w * x[n].z, total.w += w * x[n].w, sum += w;
        }
      }
      const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (column == 0) store_row_lse(work, row, sum == 0.0f ? -infinity() : most + log2_approx(sum) * kLn2);
      char* const out = out_row(work, row);
      if (out == nullptr) continue;
      if constexpr (kOutBytes == 2) {
        *reinterpret_cast<uint2*>(out + 2 * column) = {pack2(total.x * scale, total.y * scale),
                                                       pack2(total.z * scale, total.w * scale)};
      } else {
        *reinterpret_cast<float4*>(out + 4 * column) = {total.x * scale, total.y * scale, total.z * scale,
                                                        total.w * scale};
      }
    }
  }

  // Stores the rows of the work before this one.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const QueryWork work = smem.work(i - 1);
    const int num_rows = min(work.num_rows * params.problem.heads_per_kv - work.row_begin, kBlockQ);
    float lse[2];
    finish(work, softmax, o_scale, lse);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (o_scale[h] == 0.0f) clear_row(o, h);
    if (work.num_splits == 1) {
      store_rows(work, {0, num_rows}, lse);
      return;
    }
    // Rows past the bound on lengths are not used, and belong to the first split.
    const int shared_rows = min(num_rows, params.partial_rows);
    if (work.split == 0) store_rows(work, {shared_rows, num_rows}, lse);
    store_split(work, {0, shared_rows}, lse);
    bar_sync(kMerge, 128);
    bool is_last = false;
    if (threadIdx.x % 128 == 0) {  // why one for all: they stored before the barrier
      is_last = atomic_add_acq_rel(params.arrivals + work.block, 1) == work.num_splits - 1;
      if (is_last) params.arrivals[work.block] = 0;  // why: it must be zero for the next launch
    }
    if (bar_sync_any(kMerge, 128, is_last)) merge(work, shared_rows);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ DecodeParams params) {
  run_roles<DecodeConsumer>(params);
}
