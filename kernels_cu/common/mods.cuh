// score_mod, mask_mod, bias, sinks and dropout (mods). The host prints them as `ModFunctions`
// (cuflash/planning/mod_code.py), hoisted into four levels: head, row, pair of columns, element. A row is a query and a
// column a key, or the reverse in kernels whose fragments have keys as rows.
//
//   element   score: the score with its bias, in log2 units, from a product q·k (after the softcap)
//             visible: true if the functions let the query see the key
//             slope: d score / d (input of score_mod); dq and dk are multiplied by softmax_scale later
#pragma once
#include "../ptx/float_math.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "select.cuh"

// Scores up to this one weigh nothing, as -inf does: models add the least number of a dtype to hide keys.
constexpr float kLeastScore = -1e37f * 1.4426950408889634f;

// Marks the product of a masked pair for functions that run later: a NaN that no instruction generates. With a
// score_mod -inf would not do, because a product may be -inf and still have any score.
__device__ __forceinline__ float hidden_product() { return kScoreMod ? __uint_as_float(0xffedcba9u) : -infinity(); }
__device__ __forceinline__ bool is_hidden_product(float x) {
  return kScoreMod ? __float_as_uint(x) == __float_as_uint(hidden_product()) : x == -infinity();
}

// The functions of a kernel without mods: each score is its product, and all pairs are visible.
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

  // Returns the row level, for columns from first_column on. `addend` is added to all scores of the row at no cost. The
  // last parameter is the row's half of the fragment, which only TwoModHeads uses.
  __device__ __forceinline__ Row row(int row_idx, int first_column, float addend = 0.0f, int = 0) const {
    return Functions::row(arrays, head, row_idx, first_column, addend);
  }

  // Returns the level of two columns of a row, of which the first is even, so that one load may serve both.
  __device__ __forceinline__ Pair pair(const Row& row, int column, int = 0) const {
    return Functions::pair(arrays, row, column);
  }

  // Returns the result for a product in that row, `column` columns after the first. `pair` includes the column.
  __device__ __forceinline__ Result at(const Row& row, const Pair& pair, float product, int column, int = 0) const {
    return Functions::element(arrays, head, row, pair, product, column);
  }
};

// The functions of a lane's two rows of a fragment; each row may belong to another head.
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

// The row level of a lane's two rows of a fragment of 16. `less` is subtracted from the scores of each row.
struct ModRows {
  ModHead::Row row[2];

  // column: the first one of the fragment. column_pair = lane % 4.
  template <class Heads, class Rows>
  __device__ __forceinline__ ModRows(const Heads& mod_heads, const Rows& rows, int column, int column_pair,
                                     const float2& less = {0.0f, 0.0f})
      : row{mod_heads.row(rows[0], column + 2 * column_pair, -less.x, 0),
            mod_heads.row(rows[1], column + 2 * column_pair, -less.y, 1)} {}
};

// Replaces the products of a fragment by scores, or -inf where a function masks the pair. Columns outside and rows
// inside: the reverse order spilled 196 bytes (L57). kAsksMask: evaluates the mask_mod. kMasksLeast: scores up to
// kLeastScore become -inf, too.
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

// Returns the factor from a score to its exponent.
__device__ __forceinline__ float scale_log2_of(const ProblemParams& problem) {
  return kScoreMod ? 1.0f : problem.score.scale_log2;
}

// Adds a head's sink, given the factor of a row of out and the row's lse (-inf without visible keys).
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
        lse = sink;  // out is zero, whatever the sink is
        return;
      }
      const float above = max_nan_f32(lse, sink);
      const float of_keys = expf(lse - above), of_sink = sink == above ? 1.0f : expf(sink - above);
      o_scale *= of_keys / (of_keys + of_sink);
      lse = above == infinity() ? above : above + logf(of_keys + of_sink);
    }
  }
};
