// Scores and masks of the caller's own. The program holds them as `OwnFunctions` (cuflash/planning/own_code.py), which
// finds what a head, a row and a score know in three steps. A row is a query and a column a key, or the other way round
// where a kernel's fragments have keys in their rows.
//
//   element   score: that of softmax and bias, in powers of two, from a product q·k (or what the softcap made of it)
//             visible: whether the query sees the key, as far as the functions say
//             slope: d score / d what the caller's function was given; dq and dk are multiplied by softmax_scale later
#pragma once
#include "../ptx/float_math.cuh"
#include "mask.cuh"
#include "params.cuh"

// A score that is not above it weighs nothing, as if it were -inf: models add the least number of a dtype to hide keys.
constexpr float kLeastScore = -1e37f * 1.4426950408889634f;

// The functions of one query head of a sequence. Without any, a score is its product, and everything is visible.
template <bool kExists, class Functions>
struct OwnHeadOf {
  struct Row {};
  struct Result {
    float score;
    bool visible;
    float slope;
  };

  __device__ __forceinline__ OwnHeadOf(const OwnParams&, const ProblemParams&, int, int, int, int) {}
  __device__ __forceinline__ Row row(int, int, float = 0.0f) const { return {}; }
  __device__ __forceinline__ Result at(const Row&, float product, int) const { return {product, true, 1.0f}; }
};

template <class Functions>
struct OwnHeadOf<true, Functions> {
  using Row = typename Functions::Row;
  using Result = typename Functions::Result;

  const typename Functions::Arrays& arrays;
  const typename Functions::Head head;

  __device__ __forceinline__ OwnHeadOf(const OwnParams& own, const ProblemParams& problem, int batch, int query_head,
                                       int seqlen_q, int seqlen_k)
      : arrays(own),
        head(Functions::head(own, batch, query_head, seqlen_q, seqlen_k, problem.score.softmax_scale)) {}

  // What is known of a row with the columns from first_column on. `addend` is added to all of its scores, for nothing.
  __device__ __forceinline__ Row row(int row_idx, int first_column, float addend = 0.0f) const {
    return Functions::row(arrays, head, row_idx, first_column, addend);
  }

  // The score of a product in that row, so many columns after the first.
  __device__ __forceinline__ Result at(const Row& row, float product, int column) const {
    return Functions::element(arrays, head, row, product, column);
  }
};
using OwnHead = OwnHeadOf<kOwn, OwnFunctions<kShortOffsets>>;

// Products of a fragment of 16 rows become scores, and those that a function hides -inf. `rows` are the lane's two rows,
// `column` is the first of the fragment, column_pair = lane % 4. why columns outside, rows inside: L57.
// kAsksMask: the function may hide some. Scores that weigh nothing become -inf, too, unless !kHidesLeast. `less` is taken
// off the scores of each row.
template <bool kAsksMask = kOwnMask, bool kHidesLeast = true, int kCount, class Rows>
__device__ __forceinline__ void apply_own(const OwnHead& own, float (&s)[kCount], Rows rows, int column, int column_pair,
                                          const float2& less = {0.0f, 0.0f}) {
  if constexpr (kOwnScores || kAsksMask) {
    const int first = column + 2 * column_pair;
    const OwnHead::Row of_rows[2] = {own.row(rows[0], first, -less.x), own.row(rows[1], first, -less.y)};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = s[4 * j + 2 * half + e];
          const OwnHead::Result result = own.at(of_rows[half], score, 8 * j + e);
          if constexpr (kOwnScores) score = kHidesLeast && result.score <= kLeastScore ? -infinity() : result.score;
          if constexpr (kAsksMask) score = result.visible ? score : -infinity();
        }
      }
    }
  }
}

// The exponent of a score is the score times this.
__device__ __forceinline__ float scale_log2_of(const ProblemParams& problem) {
  return kOwnScores ? 1.0f : problem.score.scale_log2;
}

// Counts a head's sink: what multiplies a row of out, and the row's lse, which is -inf if it has seen nothing.
//   lse' = ln(exp(lse) + exp(sink))        out' = out exp(lse - lse')
template <bool kExists, class Params>
struct SinkOf {
  __device__ __forceinline__ SinkOf(const Params&, int) {}
  __device__ __forceinline__ void add(float&, float&) const {}
};
template <class Params>
struct SinkOf<true, Params> {
  float sink;

  __device__ __forceinline__ SinkOf(const Params& own, int head) {
    if (own.sinks_are_wide || kDType == DType::kFloat32) {
      sink = __ldg(static_cast<const float*>(own.sinks) + head);
    } else {
      const unsigned short bits = __ldg(static_cast<const unsigned short*>(own.sinks) + head);
      sink = kDType == DType::kFloat16 ? cvt_f32_f16(bits) : __uint_as_float(static_cast<unsigned>(bits) << 16);
    }
  }

  __device__ __forceinline__ void add(float& o_scale, float& lse) const {
    const float above = fmaxf(lse, sink);
    if (above == -infinity()) return;
    const float of_keys = expf(lse - above), of_sink = expf(sink - above);
    o_scale *= of_keys / (of_keys + of_sink);
    lse = above + logf(of_keys + of_sink);
  }
};
using Sink = SinkOf<kSinks, OwnParams>;
