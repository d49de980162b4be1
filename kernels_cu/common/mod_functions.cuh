// Device functions for printed mods (cuflash/mods/codegen/cuda.py): operations of cuflash/mods/graph/operations.py that
// C++ lacks, and captured arrays.
#pragma once
#include "../ptx/float_math.cuh"
#include "../ptx/load.cuh"
#include "config.cuh"

template <class T>
struct Unsigned;
template <>
struct Unsigned<int> {
  using Type = unsigned;
};
template <>
struct Unsigned<long long> {
  using Type = unsigned long long;
};

// Integer arithmetic that wraps. Computed in unsigned types: signed overflow is undefined in C++.
template <class T>
__device__ __forceinline__ T wrapping_add(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) + static_cast<U>(y));
}

template <class T>
__device__ __forceinline__ T wrapping_subtract(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) - static_cast<U>(y));
}

template <class T>
__device__ __forceinline__ T wrapping_multiply(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) * static_cast<U>(y));
}

// Shifts by any number of bits; a negative number counts as very large.
template <class T>
__device__ __forceinline__ T shifted_left(T x, T bits) {
  using U = typename Unsigned<T>::Type;
  constexpr U kBits = 8 * sizeof(T);
  return static_cast<U>(bits) < kBits ? static_cast<T>(static_cast<U>(x) << (static_cast<U>(bits) % kBits)) : T(0);
}

template <class T>
__device__ __forceinline__ T shifted_right(T x, T bits) {
  using U = typename Unsigned<T>::Type;
  constexpr U kBits = 8 * sizeof(T);
  return x >> (static_cast<U>(bits) < kBits ? bits : T(kBits - 1));
}

template <class T>
__device__ __forceinline__ T absolute(T x) {
  return max(x, wrapping_subtract(T(0), x));
}

// Division towards zero and its remainder, as in C. Integer division by zero gives zero in both. The least integer
// divided by -1 wraps; C++ leaves it undefined.
template <class T>
__device__ __forceinline__ T truncated_divide(T x, T y) {
  return y == 0 ? T(0) : y == -1 ? wrapping_subtract(T(0), x) : x / y;
}
__device__ __forceinline__ float truncated_divide(float x, float y) { return truncf(x / y); }

template <class T>
__device__ __forceinline__ T truncated_remainder(T x, T y) {
  return y == 0 || y == -1 ? T(0) : x % y;
}
__device__ __forceinline__ float truncated_remainder(float x, float y) { return fmodf(x, y); }

// Division towards minus infinity and its remainder, which has the sign of the divisor, as in Python. Integer division
// by zero gives zero in both.
template <class T>
__device__ __forceinline__ T floor_divide(T x, T y) {
  const T remainder = truncated_remainder(x, y);
  return truncated_divide(x, y) - T(remainder != 0 && (remainder < 0) != (y < 0));
}

template <class T>
__device__ __forceinline__ T floor_remainder(T x, T y) {
  const T remainder = truncated_remainder(x, y);
  return remainder + (remainder != 0 && (remainder < 0) != (y < 0) ? y : T(0));
}

__device__ __forceinline__ float floor_remainder(float x, float y) {
  const float remainder = fmodf(x, y);
  if (remainder == 0.0f) return copysignf(0.0f, y);
  return (remainder < 0.0f) != (y < 0.0f) ? remainder + y : remainder;
}

__device__ __forceinline__ float floor_divide(float x, float y) {
  if (y == 0.0f) return x / y;
  // Not floor(x / y): the division may round up to an integer.
  const float remainder = fmodf(x, y);
  const float below = remainder != 0.0f && (remainder < 0.0f) != (y < 0.0f) ? 1.0f : 0.0f;
  const float quotient = (x - remainder) / y - below;
  if (quotient == 0.0f) return copysignf(0.0f, y < 0.0f ? -x : x);
  const float whole = floorf(quotient);
  return quotient - whole > 0.5f ? whole + 1.0f : whole;
}

// Returns x / y, rounded as by a division, from the inverse of a constant y. A division is a call that takes several
// times as long.
__device__ __forceinline__ float divided(float x, float y, float inverse) {
  const float quotient = x * inverse;
  // Two forms of one number, whose zeros have the signs that keep the quotient's sign.
  const float remainder = y > 0.0f ? -fmaf(quotient, y, -x) : fmaf(-quotient, y, x);
  const float corrected = fmaf(remainder, inverse, quotient);
  return corrected == corrected ? corrected : quotient;  // if x is infinite, the remainder is NaN
}

// Minimum and maximum that return NaN if either argument is NaN; fminf and fmaxf ignore NaN.
__device__ __forceinline__ float minimum(float x, float y) { return min_nan_f32(x, y); }
__device__ __forceinline__ float maximum(float x, float y) { return max_nan_f32(x, y); }

// Returns -1, 0 or 1, and NaN for NaN. The sum turns -0 into 0, as in NumPy.
__device__ __forceinline__ float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x + 0.0f; }

// For 16-bit operands one approximate instruction; its error, up to 2^-11 of the result, is below the
// error of 16-bit numbers.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  if constexpr (kDType == DType::kFloat32) return tanhf(x);
  else return tanh_approx_f32(x);
}

// Element types of captured arrays that C++ lacks.
struct Float16 {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

// Converts an element to its type in computations.
template <class T>
__device__ __forceinline__ T widened(T x) {
  return x;
}
__device__ __forceinline__ float widened(Float16 x) { return cvt_f32_f16(x.bits); }
__device__ __forceinline__ float widened(BFloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

// Loads an element of an array that no kernel writes.
template <class T>
__device__ __forceinline__ T element_at(const T* pointer) {
  return __ldg(pointer);
}
__device__ __forceinline__ Float16 element_at(const Float16* pointer) { return {__ldg(&pointer->bits)}; }
__device__ __forceinline__ BFloat16 element_at(const BFloat16* pointer) { return {__ldg(&pointer->bits)}; }

template <bool kShortOffsets>
struct OffsetOf {
  using Type = long long;
};
template <>
struct OffsetOf<true> {
  using Type = int;
};

// Elements of an array along the columns of a row, from the tile's first column on. Every visible column is inside the
// array.
template <class T>
struct ArrayRun {
  const T* first;
  int last;  // the last column inside the array
};

// An unsigned integer of kBytes bytes.
template <int kBytes>
struct Bits;
template <>
struct Bits<1> {
  using Type = unsigned char;
};
template <>
struct Bits<2> {
  using Type = unsigned short;
};
template <>
struct Bits<4> {
  using Type = unsigned;
};
template <>
struct Bits<8> {
  using Type = unsigned long long;
};

// The elements of columns 2 n and 2 n + 1. kTogether: the pair is aligned to its size, so one load serves both.
template <class T, bool kTogether>
struct LoadedPair {
  T even, odd;

  __device__ __forceinline__ auto at(int column) const { return widened(column % 2 == 0 ? even : odd); }
};
template <class T>
struct LoadedPair<T, true> {
  using Both = typename Bits<2 * sizeof(T)>::Type;
  Both both;

  __device__ __forceinline__ auto at(int column) const {
    const auto bits = static_cast<typename Bits<sizeof(T)>::Type>(both >> column % 2 * 8 * sizeof(T));
    T x;
    memcpy(&x, &bits, sizeof(T));
    return widened(x);
  }
};

// A captured array of a traced function. kShortOffsets: every element offset and every stride fits into an int; the
// layout is the same either way. No extent is zero: for an empty array the host passes an array that holds one zero.
template <class T, int kRank, bool kShortOffsets>
struct CapturedArray {
  using Offset = typename OffsetOf<kShortOffsets>::Type;
  static constexpr int kAxes = kRank > 0 ? kRank : 1;

  const T* pointer;
  long long strides[kAxes];  // in elements
  int extents[kAxes];

  // Returns the offset of an index along an axis; a negative index counts from the end. Any index is clamped to the
  // array. Written without a conditional expression, because NVRTC may copy an unrolled loop for each outcome.
  __device__ __forceinline__ Offset wrapped(int axis, int index) const {
    return way(axis, min(max(index + (index >> 31 & extents[axis]), 0), extents[axis] - 1));
  }
  __device__ __forceinline__ Offset wrapped(int axis, long long index) const {
    const long long extent = extents[axis];
    return way(axis, static_cast<int>(min(max(index + (index >> 63 & extent), 0ll), extent - 1)));
  }

  // Returns the offset of an index that cannot be negative.
  __device__ __forceinline__ Offset clamped(int axis, int index) const {
    return way(axis, min(index, extents[axis] - 1));
  }
  __device__ __forceinline__ Offset clamped(int axis, long long index) const {
    return way(axis, static_cast<int>(min(index, static_cast<long long>(extents[axis] - 1))));
  }

  // Returns the element at the sum of the offsets along all axes.
  __device__ __forceinline__ auto at(Offset offset) const { return widened(element_at(pointer + offset)); }

  // Returns the elements along an axis from an index on; `offset` sums the offsets along all other axes.
  __device__ __forceinline__ ArrayRun<T> run(int axis, int index, Offset offset) const {
    return {pointer + offset + way(axis, index), extents[axis] - 1 - index};
  }

  // Returns the elements of two columns, of which the first is even; zeros outside the array.
  template <bool kTogether>
  __device__ __forceinline__ LoadedPair<T, kTogether> pair(const ArrayRun<T>& run, int column) const {
    if constexpr (kTogether) {
      using Both = typename LoadedPair<T, true>::Both;
      return {load_or_zero(reinterpret_cast<const Both*>(run.first + column), column <= run.last)};
    } else {
      LoadedPair<T, false> x{};
      if (column <= run.last) x.even = element_at(run.first + column);
      if (column < run.last) x.odd = element_at(run.first + column + 1);
      return x;
    }
  }

 private:
  __device__ __forceinline__ Offset way(int axis, int index) const {
    return static_cast<Offset>(index) * static_cast<Offset>(strides[axis]);
  }
};
