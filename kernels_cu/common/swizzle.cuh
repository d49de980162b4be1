// Tiles in shared memory without bank conflicts. A row has kChunks chunks of 16 bytes and stores chunk c at place
// c ^ phase(row): the phase differs among the eight rows in a line whose chunks would else lie in the same banks.
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

  // The address of (row + rows, chunk + even_chunks), from that of (row, chunk) with chunk < 2. It costs one XOR and an
  // immediate. `rows` must be a multiple of 8, so that the phase stays; even_chunks must be even, so that the lowest
  // bit of the chunk stays.
  __device__ static __forceinline__ unsigned advance(unsigned address, int rows, int even_chunks) {
    return (address ^ ((even_chunks & (kSpan - 1)) << 4)) + ((even_chunks & ~(kSpan - 1)) << 4) + rows * kRowBytes;
  }
};
