// The softmax of this build, over kFragments fragments of 16 rows with kCount registers each; a lane holds two rows of
// each. `update` replaces scores by weights. It returns true if the caller must multiply the output so far by o_scale
// before adding the tile's. `finish` returns the factor from the output to the result, and the lse.
#pragma once
#include "softmax_flash1.cuh"
#include "softmax_flash2.cuh"
#include "softmax_flashd.cuh"

template <Algorithm kWhich, int kFragments, int kCount>
struct SoftmaxPolicy : SoftmaxFlash2<kFragments, kCount> {};
template <int kFragments, int kCount>
struct SoftmaxPolicy<Algorithm::kFlash1, kFragments, kCount> : SoftmaxFlash1<kFragments, kCount> {};
template <int kFragments, int kCount>
struct SoftmaxPolicy<Algorithm::kFlashD, kFragments, kCount> : SoftmaxFlashD<kFragments, kCount> {};
