// score_mod, mask_mod, bias, sinks and dropout (mods). The program holds them as `ModFunctions`
// (cuflash/planning/mod_code.py), which finds what a head, a row, two columns of it and a score know in as many steps.
// A row is a query and a column a key, or the other way round where a kernel's fragments have keys in their rows.
//
//   element   score: that of softmax and bias, in powers of two, from a product q·k (or what the softcap made of it)
//             visible: whether the query sees the key, as far as the functions say
//             slope: d score / d what the score_mod was given; dq and dk are multiplied by softmax_scale later
#pragma once
#include "../ptx/float_math.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "select.cuh"

// A score that is not above it weighs nothing, as if it were -inf: models add the least number of a dtype to hide keys.
constexpr float kLeastScore = -1e37f * 1.4426950408889634f;

// What a mask puts in the place of the product of a hidden pair, where functions are asked later: a NaN that no
// instruction makes. why not -inf if a function makes scores: a product may be -inf, and its score may be any.
__device__ __forceinline__ float hidden_product() { return kScoreMod ? __uint_as_float(0xffedcba9u) : -infinity(); }
__device__ __forceinline__ bool is_hidden_product(float x) {
  return kScoreMod ? __float_as_uint(x) == __float_as_uint(hidden_product()) : x == -infinity();
}

// The functions of a kernel without mods: a score is its product, and everything is visible.
struct NoFunctions {
  using Arrays = ModParams;
  struct Head {};
  struct Row {};
  struct Pair {};
  struct Result {
    float score;
    bool visible;
    float slope;
  };

  __device__ static Head head(const Arrays&, int, int, int, int, float) { return {}; }
  __device__ static Row row(const Arrays&, const Head&, int, int, float) { return {}; }
  __device__ static Pair pair(const Arrays&, const Row&, int) { return {}; }
  __device__ static Result element(const Arrays&, const Head&, const Row&, const Pair&, float product, int) {
    return {product, true, 1.0f};
  }
};

// The functions of one query head of a sequence.
struct ModHead {
  using Functions = Select<kHasMods, ModFunctions<kShortOffsets>, NoFunctions>;
  using Row = Functions::Row;
  using Pair = Functions::Pair;
  using Result = Functions::Result;

  const Functions::Arrays& arrays;
  const Functions::Head head;

  __device__ __forceinline__ ModHead(const ModParams& mod_params, const ProblemParams& problem, int batch,
                                     int query_head, int seqlen_q, int seqlen_k)
      : arrays(mod_params),
        head(Functions::head(mod_params, batch, query_head, seqlen_q, seqlen_k, problem.score.softmax_scale)) {}

  // What is known of a row with the columns from first_column on. `addend` is added to all of its scores, for nothing.
  // The last number is the half of a fragment that has the row: TwoModHeads.
  __device__ __forceinline__ Row row(int row_idx, int first_column, float addend = 0.0f, int = 0) const {
    return Functions::row(arrays, head, row_idx, first_column, addend);
  }

  // What is known of two columns of a row, of which the first is even. why: it may be loaded together.
  __device__ __forceinline__ Pair pair(const Row& row, int column, int = 0) const {
    return Functions::pair(arrays, row, column);
  }

  // The score of a product in that row, so many columns after the first. `pair` has the column.
  __device__ __forceinline__ Result at(const Row& row, const Pair& pair, float product, int column, int = 0) const {
    return Functions::element(arrays, head, row, pair, product, column);
  }
};

// The same of a lane's two rows of a fragment, where each may be of another head.
struct TwoModHeads {
  const ModHead upper, lower;

  __device__ __forceinline__ ModHead::Row row(int row_idx, int first_column, float addend, int half) const {
    return (half == 0 ? upper : lower).row(row_idx, first_column, addend);
  }
  __device__ __forceinline__ ModHead::Pair pair(const ModHead::Row& row, int column, int half) const {
    return (half == 0 ? upper : lower).pair(row, column);
  }
  __device__ __forceinline__ ModHead::Result at(const ModHead::Row& row, const ModHead::Pair& pair, float product,
                                                int column, int half) const {
    return (half == 0 ? upper : lower).at(row, pair, product, column);
  }
};

// What is known of a lane's two rows of a fragment of 16 from a column on. `less` is taken off the scores of each row.
struct ModRows {
  ModHead::Row row[2];

  // column: the first of the fragment. column_pair = lane % 4.
  template <class Heads, class Rows>
  __device__ __forceinline__ ModRows(const Heads& mod_heads, const Rows& rows, int column, int column_pair,
                                     const float2& less = {0.0f, 0.0f})
      : row{mod_heads.row(rows[0], column + 2 * column_pair, -less.x, 0),
            mod_heads.row(rows[1], column + 2 * column_pair, -less.y, 1)} {}
};

// Products of a fragment become scores, and those that a function hides -inf. why columns outside, rows inside: L57.
// kAsksMask: the function may hide some. Scores that weigh nothing become -inf, too, unless !kMasksLeast.
template <bool kAsksMask = kMaskMod, bool kMasksLeast = true, class Heads, int kCount>
__device__ __forceinline__ void apply_mods(const Heads& mod_heads, float (&s)[kCount], const ModRows& rows) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const ModHead::Pair pairs[2] = {mod_heads.pair(rows.row[0], 8 * j, 0), mod_heads.pair(rows.row[1], 8 * j, 1)};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = s[4 * j + 2 * half + e];
        const ModHead::Result result = mod_heads.at(rows.row[half], pairs[half], score, 8 * j + e, half);
        if constexpr (kScoreMod) score = kMasksLeast && result.score <= kLeastScore ? -infinity() : result.score;
        if constexpr (kAsksMask) score = result.visible ? score : -infinity();
      }
    }
  }
}

// The exponent of a score is the score times this.
__device__ __forceinline__ float scale_log2_of(const ProblemParams& problem) {
  return kScoreMod ? 1.0f : problem.score.scale_log2;
}

// Counts a head's sink: what multiplies a row of out, and the row's lse, which is -inf if it has seen nothing.
//   lse' = ln(exp(lse) + exp(sink))        out' = out exp(lse - lse')
struct Sink {
  float sink;

  template <class Params>
  __device__ __forceinline__ Sink(const Params& params, int head) {
    if constexpr (kSinks) {
      if (params.sinks_are_wide || kDType == DType::kFloat32) {
        sink = __ldg(static_cast<const float*>(params.sinks) + head);
      } else {
        const unsigned short bits = __ldg(static_cast<const unsigned short*>(params.sinks) + head);
        sink = kDType == DType::kFloat16 ? cvt_f32_f16(bits) : __uint_as_float(static_cast<unsigned>(bits) << 16);
      }
    }
  }

  __device__ __forceinline__ void add(float& o_scale, float& lse) const {
    if constexpr (kSinks) {
      if (lse == -infinity()) {
        lse = sink;  // out is zero, and stays so whatever the sink is
        return;
      }
      const float above = max_nan_f32(lse, sink);
      const float of_keys = expf(lse - above), of_sink = sink == above ? 1.0f : expf(sink - above);
      o_scale *= of_keys / (of_keys + of_sink);
      lse = above == infinity() ? above : above + logf(of_keys + of_sink);
    }
  }
};
