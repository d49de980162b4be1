// Half-open ranges, and constexpr minimum and maximum.
#pragma once

struct Range {
  int begin, end;
};

// constexpr, for tests that check masks and ranges in static_assert; CUDA's min and max are not.
template <class T>
__device__ constexpr T const_min(T a, T b) {
  return a < b ? a : b;
}

template <class T>
__device__ constexpr T const_max(T a, T b) {
  return a > b ? a : b;
}
