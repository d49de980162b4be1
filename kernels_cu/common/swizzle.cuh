// Shared-memory tiles without bank conflicts: a row of kChunks 16-byte chunks stores chunk c at c ^ phase(row), where
// the phase walks through the banks that eight consecutive rows would otherwise share.
#pragma once

template <int kChunks>
struct Swizzle {
  // The largest power of two, up to the 8 chunks (128 bytes) of all banks, that divides a row.
  static constexpr int kSpan = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
  static constexpr int kShift = kSpan == 8 ? 0 : kSpan == 4 ? 1 : kSpan == 2 ? 2 : 3;
  static constexpr int kRowBytes = kChunks * 16;

  __device__ static __forceinline__ int phase(int row) { return (row >> kShift) & (kSpan - 1); }

  // Byte offset of (row, chunk).
  __device__ static __forceinline__ unsigned offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ phase(row)) << 4);
  }

  // From the address of (row, chunk) with chunk < 2, that of (row + rows, chunk + even_chunks): one XOR and an
  // immediate. rows must be a multiple of 8 and even_chunks even, so that neither disturbs phase or the lowest chunk
  // bit.
  __device__ static __forceinline__ unsigned advance(unsigned address, int rows, int even_chunks) {
    return (address ^ ((even_chunks & (kSpan - 1)) << 4)) + ((even_chunks & ~(kSpan - 1)) << 4) + rows * kRowBytes;
  }
};
