// The softmax of this build: kTiles 16-row fragments of kCount registers, 2 rows a lane and fragment.
#pragma once
#include "softmax_flash1.cuh"
#include "softmax_flash2.cuh"
#include "softmax_flashd.cuh"

template <Algorithm kWhich, int kTiles, int kCount>
struct SoftmaxOf;
template <int kTiles, int kCount>
struct SoftmaxOf<Algorithm::kFlash1, kTiles, kCount> : SoftmaxFlash1<kTiles, kCount> {};
template <int kTiles, int kCount>
struct SoftmaxOf<Algorithm::kFlash2, kTiles, kCount> : SoftmaxFlash2<kTiles, kCount> {};
template <int kTiles, int kCount>
struct SoftmaxOf<Algorithm::kFlashD, kTiles, kCount> : SoftmaxFlashD<kTiles, kCount> {};
