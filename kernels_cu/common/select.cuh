// Compile-time selection of a type.
#pragma once

template <bool kCondition, class A, class B>
struct SelectOf {
  using Type = A;
};
template <class A, class B>
struct SelectOf<false, A, B> {
  using Type = B;
};

// A if kCondition, else B. NVRTC has no <type_traits>.
template <bool kCondition, class A, class B>
using Select = typename SelectOf<kCondition, A, B>::Type;
