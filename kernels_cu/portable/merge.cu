// merge: merges partial attention states (out, lse) over disjoint keys into the state over all keys. It blends whole
// states as FLASH-D (arXiv 2505.14201) blends tiles:
//
//   w = sigmoid(lse_i - lse)   out = out + (out_i - out) w   lse = lse + softplus(lse_i - lse)
//
// Roles    A thread owns up to 16 bytes of one row of out. The first thread of a row also owns its lse.
#include "../common/params.cuh"
#include "../common/vector.cuh"

static_assert(sizeof(MergeParams) == kParamsBytes, "the host packs other parameters");

__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ MergeParams params) {
  const int chunks_per_row = (params.head_dim_v + kChunkElements - 1) / kChunkElements;
  const long long index = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  const long long row = index / chunks_per_row;  // (batch, seqlen, heads)
  if (row >= params.num_elements / params.head_dim_v) return;
  const int column = static_cast<int>(index - row * chunks_per_row) * kChunkElements;
  const int count = min(params.head_dim_v - column, kChunkElements);
  const bool whole_chunks = params.head_dim_v % kChunkElements == 0;  // then all rows are aligned if the first one is
  const long long position = row / params.heads;                      // (batch, seqlen)
  const long long batch = position / params.seqlen;
  const long long lse_index = (batch * params.heads + row % params.heads) * params.seqlen + position % params.seqlen;
  const long long offset = row * params.head_dim_v * kElementBytes;

  float lse = -infinity(), o[kChunkElements] = {};
#pragma unroll 1
  for (int i = 0; i < params.num_states; ++i) {
    const float lse_i = params.lses[i][lse_index];
    if (lse_i == -infinity()) continue;  // a state without visible keys
    const void* const out_i = params.outs[i];
    const Chunk<kDType> chunk =
        load_chunk<kDType>(static_cast<const char*>(out_i) + offset, column, count, whole_chunks && is_aligned(out_i));
    const float difference = lse_i - lse;
    const float w = 1.0f / (1.0f + expf(-difference));
    lse = fmaxf(lse_i, lse) + log1pf(expf(-fabsf(difference)));
#pragma unroll
    for (int e = 0; e < kChunkElements; ++e) o[e] += (chunk.get(e) - o[e]) * w;
  }

  Chunk<kDType> result;
#pragma unroll
  for (int e = 0; e < kChunkElements; e += 2) result.set2(e, o[e], o[e + 1]);
  store_chunk(static_cast<char*>(params.out) + offset, column, count, whole_chunks && is_aligned(params.out), result);
  if (column == 0) params.lse[lse_index] = lse;
}
