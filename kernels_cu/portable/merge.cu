// merge: partial attention states (out, lse) over disjoint keys become the state over all of them. FLASH-D's blend
// (arXiv 2505.14201) over whole states:
//   w = sigmoid(lse_i - lse)   out = out + (out_i - out) w   lse = lse + softplus(lse_i - lse)
//
// Roles: a thread owns up to 16 bytes of one row of out; the first of a row also owns its lse.
#include "../common/numeric.cuh"
#include "../common/params.cuh"

static_assert(sizeof(MergeParams) == kParamsBytes, "the host packs other parameters");

struct alignas(16) Chunk {
  unsigned words[4];
};

// Element i of a chunk as float …
__device__ __forceinline__ float chunk_get(const Chunk& chunk, int i) {
  if constexpr (kDType == DType::kFloat32) return __uint_as_float(chunk.words[i]);
  const unsigned bits = chunk.words[i / 2] >> (16 * (i % 2)) & 0xffffu;
  if constexpr (kDType == DType::kBFloat16) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}

// … and one element from or to memory that is not 16-byte aligned.
__device__ __forceinline__ void chunk_load_element(Chunk& chunk, const void* row, int column, int i) {
  if constexpr (kDType == DType::kFloat32) {
    chunk.words[i] = static_cast<const unsigned*>(row)[column];
  } else {
    chunk.words[i / 2] |= static_cast<unsigned>(static_cast<const unsigned short*>(row)[column]) << (16 * (i % 2));
  }
}

__device__ __forceinline__ void chunk_store_element(const Chunk& chunk, void* row, int column, int i) {
  if constexpr (kDType == DType::kFloat32) {
    static_cast<unsigned*>(row)[column] = chunk.words[i];
  } else {
    static_cast<unsigned short*>(row)[column] = static_cast<unsigned short>(chunk.words[i / 2] >> (16 * (i % 2)));
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ MergeParams params) {
  const int chunks_per_row = (params.head_dim_v + kChunkElements - 1) / kChunkElements;
  const long long index = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  const long long row = index / chunks_per_row;  // (batch, seqlen, heads)
  if (row >= params.num_elements / params.head_dim_v) return;
  const int column = static_cast<int>(index - row * chunks_per_row) * kChunkElements;
  const int count = min(params.head_dim_v - column, kChunkElements);
  const bool vector = params.vector;
  const long long position = row / params.heads;  // (batch, seqlen)
  const long long batch = position / params.seqlen;
  const long long lse_index = (batch * params.heads + row % params.heads) * params.seqlen + position % params.seqlen;
  const long long offset = row * params.head_dim_v * kElementBytes;

  float lse = -infinity(), o[kChunkElements] = {};
#pragma unroll 1
  for (int i = 0; i < params.num_states; ++i) {
    const float lse_i = params.lses[i][lse_index];
    if (lse_i == -infinity()) continue;  // saw nothing
    const char* const out_i = static_cast<const char*>(params.outs[i]) + offset;
    Chunk chunk = {};
    if (vector) {
      chunk = *reinterpret_cast<const Chunk*>(out_i + column * kElementBytes);
    } else {
#pragma unroll
      for (int e = 0; e < kChunkElements; ++e) {
        if (e < count) chunk_load_element(chunk, out_i, column + e, e);
      }
    }
    const float difference = lse_i - lse;
    const float w = 1.0f / (1.0f + expf(-difference));
    lse = fmaxf(lse_i, lse) + log1pf(expf(-fabsf(difference)));
#pragma unroll
    for (int e = 0; e < kChunkElements; ++e) o[e] += (chunk_get(chunk, e) - o[e]) * w;
  }

  Chunk result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kDType == DType::kFloat32) {
      result.words[i] = __float_as_uint(o[i]);
    } else {
      result.words[i] = pack2(o[2 * i], o[2 * i + 1]);
    }
  }
  char* const out = static_cast<char*>(params.out) + offset;
  if (vector) {
    *reinterpret_cast<Chunk*>(out + column * kElementBytes) = result;
  } else {
#pragma unroll
    for (int e = 0; e < kChunkElements; ++e) {
      if (e < count) chunk_store_element(result, out, column + e, e);
    }
  }
  if (column == 0) params.lse[lse_index] = lse;
}
