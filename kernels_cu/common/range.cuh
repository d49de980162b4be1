// Half-open ranges, and the minimum and maximum of two numbers.
#pragma once

struct Range {
  int begin, end;
};

// why: CUDA's own min and max cannot be evaluated in a static_assert, by which the tests check masks and ranges.
template <class T>
__device__ constexpr T const_min(T a, T b) {
  return a < b ? a : b;
}

template <class T>
__device__ constexpr T const_max(T a, T b) {
  return a > b ? a : b;
}
