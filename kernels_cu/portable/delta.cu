// delta: what backward needs of each query, delta = rowsum(dout out) - dlse and lse in the kernels' units; and the
// accumulator of dq set to zero or, for the kernels that take turns at it, the counters and the rows of dq that they
// pass over.
//
// Roles: 8 threads own a row, 32 rows of one head a block.
#include "../common/fragments.cuh"
#include "../common/params.cuh"
#include "../common/vector.cuh"

static_assert(sizeof(BackwardParams) == kParamsBytes, "the host packs other parameters");

constexpr int kLanes = 8;
constexpr int kRows = kNumThreads / kLanes;

// dout · out over the 16 bytes of dout at `column`; kWhole: all of them exist, and are aligned.
template <bool kWhole>
__device__ __forceinline__ float dot_chunk(const char* dout, const char* out, int column, const BackwardParams& p) {
  const int count = kWhole ? Chunk<kDType>::kElements : p.head_dim_v - column;
  const Chunk<kDType> x = load_chunk<kDType>(dout, column, count, kWhole || p.aligned & 8);
  float sum = 0.0f;
  constexpr int kStep = Chunk<kOutDType>::kElements;
#pragma unroll
  for (int i = 0; i < Chunk<kDType>::kElements; i += kStep) {
    const Chunk<kOutDType> y = load_chunk<kOutDType>(out, column + i, count - i, kWhole || p.aligned & 16);
#pragma unroll
    for (int e = 0; e < kStep; ++e) sum = fmaf(x.get(i + e), y.get(e), sum);
  }
  return sum;
}

// The thread's share of a row. why twice as many columns at a time: so many loads are under way.
template <bool kWhole>
__device__ __forceinline__ float dot_row(const char* dout, const char* out, int lane, const BackwardParams& p) {
  float sum = 0.0f;
#pragma unroll(kWhole ? 2 : 1)
  for (int column = lane * kChunkElements; column < p.head_dim_v; column += kLanes * kChunkElements) {
    sum += dot_chunk<kWhole>(dout, out, column, p);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ BackwardParams p) {
  const int blocks = p.stats_rows / kRows;
  const unsigned index = blockIdx.x / blocks;  // (batch, head)
  const int row_begin = (blockIdx.x - index * blocks) * kRows;
  const int batch = index / p.heads_q, head = index - batch * p.heads_q;
  const int row = row_begin + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const bool sees = row >= p.row_begin && row < p.row_end;

  float delta = 0.0f, lse = -infinity(), dlse = 0.0f;
  if (sees) {
    const long long at = static_cast<long long>(index) * p.seqlen_q + row;
    lse = p.lse[at];  // why so early: it comes beside what follows
    if (p.dlse != nullptr) dlse = p.dlse[at];
    const char* const dout =
        static_cast<const char*>(p.dout.pointer) +
        (batch * p.dout.stride_batch + row * p.dout.stride_seqlen + head * p.dout.stride_head) * kElementBytes;
    const char* const out =
        static_cast<const char*>(p.out.pointer) +
        (batch * p.out.stride_batch + row * p.out.stride_seqlen + head * p.out.stride_head) * kOutBytes;
    const bool whole = (p.aligned & 24) == 24 && p.head_dim_v % kChunkElements == 0;
    delta = whole ? dot_row<true>(dout, out, lane, p) : dot_row<false>(dout, out, lane, p);
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
  if (lane == 0) {
    // why: rows that see nothing, and those past the end, weigh nothing: exp2(s - inf) = 0.
    const bool nothing = lse == -infinity();
    const float2 stats = nothing ? make_float2(infinity(), 0.0f) : make_float2(lse * kLog2E, delta - dlse);
    if (!p.sm90) {
      p.stats[static_cast<long long>(index) * p.stats_rows + row] = stats;
    } else {
      float* const at = reinterpret_cast<float*>(p.stats) + static_cast<long long>(index) * 2 * p.stats_rows + row;
      at[0] = stats.x, at[p.stats_rows] = stats.y;
    }
  }

  if (p.turns != nullptr) {
    if (!sees && row < p.seqlen_q) {
      char* const dq = static_cast<char*>(p.dq.pointer) +
                       (batch * p.dq.stride_batch + row * p.dq.stride_seqlen + head * p.dq.stride_head) * kElementBytes;
      for (int column = lane * kChunkElements; column < p.head_dim; column += kLanes * kChunkElements) {
        store_chunk(dq, column, p.head_dim - column, p.aligned & 32, Chunk<kDType>{});
      }
    }
    if (row_begin == 0) {
      unsigned* const turns = p.turns + static_cast<long long>(index) * p.num_q_blocks;
      for (int i = threadIdx.x; i < p.num_q_blocks; i += kNumThreads) turns[i] = 0;
      if (index == p.batch * p.heads_q - 1) {
        for (int i = threadIdx.x; i < p.shared_keys; i += kNumThreads) turns[p.num_q_blocks + i] = 0;
      }
    }
  } else if (p.dq_acc != nullptr) {
    const int tile = row_begin / 16, tiles = min(kRows / 16, (p.seqlen_q + 15) / 16 - tile);
    float4* const dq = reinterpret_cast<float4*>(fragment_tile(p.dq_acc, index, p.seqlen_q, tile, p.padded_dim));
    for (int i = threadIdx.x; i < tiles * p.padded_dim * 4; i += kNumThreads) dq[i] = make_float4(0, 0, 0, 0);
  }
}
