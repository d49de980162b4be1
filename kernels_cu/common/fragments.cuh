// Accumulators of backward in global memory, in the order of the fragments that are added to them, so that a warp
// writes whole 128-byte lines: (heads, 16-row tiles, 16-column blocks, 2 fragments of 8 columns, 128 floats).
#pragma once

constexpr int kFragmentFloats = 128;                 // of 16 x 8
constexpr int kFragmentBlock = 2 * kFragmentFloats;  // of 16 x 16

// Whether a lane's four floats are neighbours (added at once from sm_90 on), or each is one of 32 lanes' neighbours.
#if __CUDA_ARCH__ >= 900
constexpr bool kFragmentByLane = true;
#else
constexpr bool kFragmentByLane = false;
#endif

// Register i of a lane within a fragment.
__device__ __forceinline__ int fragment_index(int lane, int i) {
  return kFragmentByLane ? 4 * lane + i : 32 * i + lane;
}

// The first block of a 16-row tile of a head with this many rows and (padded) columns.
__device__ __forceinline__ float* fragment_tile(float* acc, long long head, int rows, int row_tile, int columns) {
  return acc + (head * ((rows + 15) / 16) + row_tile) * (columns / 16) * kFragmentBlock;
}
