// Scores, masks, sinks and dropout of the caller's own, as the consumers of forward and lse on Hopper use them. In plain
// kernels nothing is left of it.
#pragma once
#include "../common/dropout.cuh"
#include "../common/fragment.cuh"
#include "../common/own_scores.cuh"
#include "forward_work.cuh"

// What is the caller's own of one piece of work. `Rows` are the lane's two queries.
template <bool kExists, class Params, class AnyWork>
struct OwnWorkOf {
  struct Head {};

  __device__ __forceinline__ OwnWorkOf(const Params&, const AnyWork&) {}
  __device__ __forceinline__ Head head() const { return {}; }
  template <int kCount, class Rows>
  __device__ __forceinline__ void apply(const Head&, float (&)[kCount], const Rows&, int, bool,
                                        const float2& = {}) const {}
  template <class Rows>
  __device__ __forceinline__ void drop(float (&)[kBlockK / 2], const Rows&, int) const {}
  __device__ __forceinline__ void finish(float&, float&) const {}
};

template <class Params, class AnyWork>
struct OwnWorkOf<true, Params, AnyWork> {
  const Params& params;
  const AnyWork& work;

  __device__ __forceinline__ OwnWorkOf(const Params& own, const AnyWork& of) : params(own), work(of) {}

  // The functions of the work's head. why apart: what they load comes while products run.
  __device__ __forceinline__ OwnHead head() const {
    const auto sequence = work.sequence(params.problem);
    return OwnHead(params, params.problem, work.batch, work.head, sequence.seqlen_q(), sequence.seqlen_k());
  }

  // Products of the lane's rows, with the keys from `key` on, become scores, less what is told of each row; those that
  // are hidden become -inf. is_full: the mask among the functions shows all of the tile. why scores that weigh nothing
  // do not: kUnseen in sm90/softmax.cuh.
  template <int kCount, class Rows>
  __device__ __forceinline__ void apply(const OwnHead& head, float (&s)[kCount], const Rows& rows, int key, bool is_full,
                                        const float2& less = {0.0f, 0.0f}) const {
    if (kFullCells && is_full) apply_own<false, false>(head, s, rows, key, fresh_thread() % 4, less);
    else apply_own<kOwnMask, false>(head, s, rows, key, fresh_thread() % 4, less);
  }

  // Weights of key tile n that are dropped become zero.
  template <class Rows>
  __device__ __forceinline__ void drop(float (&weights)[kBlockK / 2], const Rows& rows, int n) const {
    Dropout(params, work.batch, work.head)
        .template drop<kBlockK % 32 == 0>(weights, rows, n * kBlockK, fresh_thread() % 4);
  }

  // Counts the sink, and multiplies a row of out by what dropout multiplies weights by.
  __device__ __forceinline__ void finish(float& o_scale, float& lse) const {
    Sink(params, work.head).add(o_scale, lse);
    if constexpr (kDropout) o_scale *= params.kept_scale;
  }
};
using OwnWork = OwnWorkOf<kOwn, KernelParams, QueryWork>;
