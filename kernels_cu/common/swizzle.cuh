// Swizzled tiles in shared memory, without bank conflicts. A row has kChunks chunks of 16 bytes and stores chunk c at
// index c ^ phase(row). The phase differs among eight consecutive rows whose chunks would otherwise share banks.
#pragma once

template <int kChunks>
struct Swizzle {
  // The largest power of two that divides a row, up to 8 chunks (128 bytes, all banks).
  static constexpr int kSpan = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
  static constexpr int kShift = kSpan == 8 ? 0 : kSpan == 4 ? 1 : kSpan == 2 ? 2 : 3;
  static constexpr int kRowBytes = kChunks * 16;

  __device__ static __forceinline__ int phase(int row) { return (row >> kShift) & (kSpan - 1); }

  // Returns the byte offset of (row, chunk).
  __device__ static __forceinline__ unsigned offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ phase(row)) << 4);
  }

  // Returns the address of (row + rows, chunk + even_chunks) from the address of (row, chunk), chunk < 2, by one XOR
  // and an immediate. `rows` must be a multiple of 8, to keep the phase; even_chunks must be even, to keep the lowest
  // bit of the chunk.
  __device__ static __forceinline__ unsigned advance(unsigned address, int rows, int even_chunks) {
    return (address ^ ((even_chunks & (kSpan - 1)) << 4)) + ((even_chunks & ~(kSpan - 1)) << 4) + rows * kRowBytes;
  }
};
