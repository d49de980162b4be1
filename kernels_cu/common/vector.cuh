// Chunks: 16 bytes of a row in global memory. Rows that are not aligned are accessed element by element.
#pragma once
#include "numeric.cuh"

template <DType kType>
struct alignas(16) Chunk {
  static constexpr int kBytes = kType == DType::kFloat32 ? 4 : 2;
  static constexpr int kElements = 16 / kBytes;
  unsigned words[4];

  __device__ __forceinline__ float get(int i) const {
    if constexpr (kType == DType::kFloat32) return __uint_as_float(words[i]);
    const unsigned bits = words[i / 2] >> (16 * (i % 2)) & 0xffffu;
    if constexpr (kType == DType::kBFloat16) return __uint_as_float(bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
  }

  // Sets elements i and i + 1 (i even) of a chunk of the input dtype.
  __device__ __forceinline__ void set2(int i, float x, float y) {
    static_assert(kType == kDType, "pack2 makes the input dtype");
    if constexpr (kType == DType::kFloat32) words[i] = __float_as_uint(x), words[i + 1] = __float_as_uint(y);
    else words[i / 2] = pack2(x, y);
  }
};

// Loads the chunk at `column` of a row. Its first `count` elements exist; the others become zero.
template <DType kType>
__device__ __forceinline__ Chunk<kType> load_chunk(const void* row, int column, int count, bool aligned) {
  const char* const from = static_cast<const char*>(row) + column * Chunk<kType>::kBytes;
  if (aligned && count >= Chunk<kType>::kElements) return *reinterpret_cast<const Chunk<kType>*>(from);
  Chunk<kType> chunk = {};
#pragma unroll
  for (int i = 0; i < Chunk<kType>::kElements; ++i) {
    if (i < count) {
      if constexpr (kType == DType::kFloat32) {
        chunk.words[i] = reinterpret_cast<const unsigned*>(from)[i];
      } else {
        chunk.words[i / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(from)[i]) << (16 * (i % 2));
      }
    }
  }
  return chunk;
}

// Stores the first `count` elements of a chunk.
template <DType kType>
__device__ __forceinline__ void store_chunk(void* row, int column, int count, bool aligned, const Chunk<kType>& chunk) {
  char* const to = static_cast<char*>(row) + column * Chunk<kType>::kBytes;
  if (aligned && count >= Chunk<kType>::kElements) {
    *reinterpret_cast<Chunk<kType>*>(to) = chunk;
    return;
  }
#pragma unroll
  for (int i = 0; i < Chunk<kType>::kElements; ++i) {
    if (i < count) {
      if constexpr (kType == DType::kFloat32) reinterpret_cast<unsigned*>(to)[i] = chunk.words[i];
      else reinterpret_cast<unsigned short*>(to)[i] = static_cast<unsigned short>(chunk.words[i / 2] >> (16 * (i % 2)));
    }
  }
}
