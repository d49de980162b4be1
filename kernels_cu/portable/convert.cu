// convert: the accumulators of backward in the input dtype: dq = softmax_scale * dq_acc and, where a kv head's query
// heads were split, dk = softmax_scale * the sum of its splits' dk_acc, and likewise dv.
//
// Roles: a thread owns 8 columns of two rows, 8 apart: 64 bytes of an accumulator (common/fragments.cuh).
#include "../common/fragments.cuh"
#include "../common/params.cuh"
#include "../common/vector.cuh"

static_assert(sizeof(BackwardParams) == kParamsBytes, "the host packs other parameters");

struct Part {
  float* acc;
  const Operand& out;
  int heads, splits, rows;
  int valid_begin, valid_end;  // other rows see nothing, or are not seen: they are zeros
  int columns, padded_columns;
  float scale;
  bool aligned;

  __device__ long long num_threads(int batch) const {
    return acc == nullptr ? 0 : static_cast<long long>(batch) * heads * ((rows + 15) / 16) * padded_columns;
  }

  // `index`: (batch, head, 16-row tile, 8-column fragment, row), the fastest last
  __device__ void convert(long long index) const {
    const int g = index % 8, fragments = padded_columns / 8, row_tiles = (rows + 15) / 16;
    const long long tile = index / 8 / fragments;
    const int fragment = static_cast<int>(index / 8 - tile * fragments), column = fragment * 8;
    const long long batch_head = tile / row_tiles;
    const int row_tile = static_cast<int>(tile - batch_head * row_tiles);
    if (column >= columns) return;

    float x[2][8] = {};  // (row, column)
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      const float4* const source = reinterpret_cast<const float4*>(
          fragment_tile(acc, batch_head * splits + split, rows, row_tile, padded_columns) + fragment * kFragmentFloats);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Either all four registers of lane 4 g + i, or register i of the lanes 4 g … 4 g + 3.
        const float4 y = source[(kFragmentByLane ? fragment_index(4 * g + i, 0) : fragment_index(4 * g, i)) / 4];
        const float words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int lane = kFragmentByLane ? i : e, reg = kFragmentByLane ? e : i;
          x[reg / 2][2 * lane + reg % 2] += words[e];
        }
      }
    }
    const int batch = static_cast<int>(batch_head / heads), head = static_cast<int>(batch_head % heads);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_tile * 16 + g + 8 * h;
      if (row >= rows) break;
      const bool valid = row >= valid_begin && row < valid_end;
      char* const target =
          static_cast<char*>(out.pointer) +
          (batch * out.stride_batch + row * out.stride_seqlen + head * out.stride_head) * kElementBytes;
#pragma unroll
      for (int c = 0; c < 8; c += kChunkElements) {
        Chunk<kDType> chunk;
#pragma unroll
        for (int e = 0; e < kChunkElements; e += 2)
          chunk.set2(e, valid ? x[h][c + e] * scale : 0.0f, valid ? x[h][c + e + 1] * scale : 0.0f);
        store_chunk(target, column + c, columns - column - c, aligned, chunk);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ BackwardParams p) {
  long long index = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  const int heads_kv = p.heads_q / p.heads_per_kv;
  const Part dq{p.dq_acc,
                p.dq,
                p.heads_q,
                1,
                p.seqlen_q,
                p.row_begin,
                p.row_end,
                p.head_dim,
                p.padded_dim,
                p.softmax_scale,
                (p.aligned & 32) != 0};
  const Part dk{p.dk_acc,  p.dk,       heads_kv,     p.splits,        p.seqlen_k,           p.key_begin,
                p.key_end, p.head_dim, p.padded_dim, p.softmax_scale, (p.aligned & 64) != 0};
  const Part dv{p.dv_acc,
                p.dv,
                heads_kv,
                p.splits,
                p.seqlen_k,
                p.key_begin,
                p.key_end,
                p.head_dim_v,
                p.padded_dim_v,
                1.0f,
                (p.aligned & 128) != 0};
  if (index < dq.num_threads(p.batch)) {
    dq.convert(index);
  } else if ((index -= dq.num_threads(p.batch)) < dk.num_threads(p.batch)) {
    dk.convert(index);
  } else if ((index -= dk.num_threads(p.batch)) < dv.num_threads(p.batch)) {
    dv.convert(index);
  }
}
