// Forward on Hopper for few queries of each sequence: the query heads of a group are rows of one block, and blocks of
// threads share the keys of a sequence.
//
//   s, p, o                     as in forward.cu, over the key tiles of a split
//   out = sum w o / sum w       over the splits, w = exp(lse of the split - the largest of them)
//
// Roles    As in forward.cu, with one warpgroup that computes; q is copied by cp.async.
// Splits   A warp leaves its rows of o and lse in memory. That of the last split to end merges them, in their order.
// Barriers As in forward.cu, without kIssue.
#include "output.cuh"

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
    const long long first = static_cast<long long>(work.first_piece + work.split) * params.partial_rows;
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

  // Merges the splits of the warp's rows, four columns a lane.
  __device__ __forceinline__ void merge(const QueryWork& work, int num_rows) const {
    const int dim = params.problem.head_dim_v, chunks = dim / 4, rows = min(num_rows - block_row(), 16);
    const long long of_split = params.partial_rows;
#pragma unroll 1
    for (int at = fresh_thread() % 32; at < rows * chunks; at += 32) {
      const int row = block_row() + at / chunks, column = at % chunks * 4;
      const long long first = work.first_piece * of_split + row;
      float most = -infinity();
      for (int split = 0; split < work.num_splits; ++split) {
        most = fmaxf(most, __ldcg(params.partial_lse + first + split * of_split));
      }
      float sum = 0.0f;
      float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
      if (most != -infinity()) {
#pragma unroll 4
        for (int split = 0; split < work.num_splits; ++split) {
          const long long from = first + split * of_split;
          const float4 x = __ldcg(reinterpret_cast<const float4*>(params.partial_out + from * dim + column));
          const float w = exp2_approx((__ldcg(params.partial_lse + from) - most) * (1.0f / kLn2));
          total.x += w * x.x, total.y += w * x.y, total.z += w * x.z, total.w += w * x.w, sum += w;
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

  // Stores the warp's rows of the work before this one.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const QueryWork work = smem.work(i - 1);
    const int num_rows = min(work.num_rows * params.problem.heads_per_kv - work.row_begin, kBlockQ);
    if (num_rows <= block_row()) return;
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
    if (shared_rows <= block_row()) return;
    store_split(work, {0, shared_rows}, lse);
    __threadfence();
    __syncwarp();
    unsigned* const arrivals = params.arrivals + 4 * work.block + warp;
    unsigned before = 0;
    if (leads) before = atomicAdd(arrivals, 1u);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before != work.num_splits - 1) return;
    if (leads) *arrivals = 0;  // why: it must be zero for the next launch
    __threadfence();
    merge(work, shared_rows);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ DecodeParams params) {
  run_roles<DecodeConsumer>(params);
}
