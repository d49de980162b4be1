// Accumulators of backward in global memory. Their order is that of the fragments which are added to them (L39):
// (heads, strips of 16 rows, blocks of 16 columns, 2 fragments of 8 columns, 128 floats).
#pragma once

constexpr int kFragmentFloats = 128;                 // of 16 x 8
constexpr int kFragmentBlock = 2 * kFragmentFloats;  // of 16 x 16

// Whether the four floats of a lane are neighbours, which sm_90 and newer add at once; else those of 32 lanes are.
#if __CUDA_ARCH__ >= 900
constexpr bool kFragmentByLane = true;
#else
constexpr bool kFragmentByLane = false;
#endif

// The place of a lane's register i within a fragment.
__device__ __forceinline__ int fragment_index(int lane, int i) {
  return kFragmentByLane ? 4 * lane + i : 32 * i + lane;
}

// The first block of a strip of a head that has this many rows and (padded) columns.
__device__ __forceinline__ float* fragment_strip(float* acc, long long head, int rows, int strip, int columns) {
  return acc + (head * ((rows + 15) / 16) + strip) * (columns / 16) * kFragmentBlock;
}
