// Float32 accumulators of backward in global memory. They have the order of the fragments that are added to them, so
// that additions need no shuffles (L39). Their axes are (heads, strips of 16 rows, blocks of 16 columns, 2 fragments of
// 8 columns, 128 floats).
#pragma once

constexpr int kFragmentFloats = 128;                 // a fragment of 16 x 8
constexpr int kFragmentBlock = 2 * kFragmentFloats;  // a block of 16 x 16

// True if a lane's four floats are contiguous, as red.v4 of sm_90 and newer adds them; else register i of 32 lanes is.
#if __CUDA_ARCH__ >= 900
constexpr bool kFragmentByLane = true;
#else
constexpr bool kFragmentByLane = false;
#endif

// Returns the index of a lane's register i within a fragment.
__device__ __forceinline__ int fragment_index(int lane, int i) {
  return kFragmentByLane ? 4 * lane + i : 32 * i + lane;
}

// Returns the first block of a strip. `rows` and `columns` (padded) are the extents of a head.
__device__ __forceinline__ float* fragment_strip(float* acc, long long head, int rows, int strip, int columns) {
  return acc + (head * ((rows + 15) / 16) + strip) * (columns / 16) * kFragmentBlock;
}
