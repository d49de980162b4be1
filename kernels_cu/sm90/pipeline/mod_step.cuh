// Scores and weights with mods in a step of backward on Hopper, for a warp's 16 rows and a tile of columns. Rows are
// keys and columns queries, or the other way round.
//
// Without the slope of scores, scores are computed at once, and become p beside dp. With it, products (after any
// softcap) are kept until dp is there, and the functions return score and slope together. Either way the score of a
// hidden pair is -inf from the start, so that its p and ds are 0. Scores that weigh nothing need no care: minus lse,
// they leave no weight.
#pragma once
#include "../../common/dropout.cuh"
#include "../../common/fragment.cuh"
#include "../../common/mods.cuh"
#include "../../common/visible_rows.cuh"

// True if ds needs the inputs of the functions, for their slope or for the softcap's.
constexpr bool kNeedsScoreModGrad = kScoreModGrad || (kScoreMod && Score::kAlwaysChanges);

// Separates pieces of a thread's elements: the compiler moves nothing across this instruction, which never runs.
// Otherwise it begins with so many elements at a time that registers spill. `count` is not negative.
__device__ __forceinline__ void end_piece(int count) {
  asm volatile("" : "+r"(count));  // opaque: if the compiler saw equal values, it would test only once
  if (count < 0) asm volatile("pmevent 1;" ::: "memory");
}

// The position of a warp's 16 rows and a tile of columns.
struct ModPlace {
  const ModParams& params;
  const ProblemParams& problem;
  WholeSequence sequence;
  int query_head, row, column;
};

// The mods of a lane's two rows. With a score_mod they are computed before the products arrive.
struct ModLane {
  const ModHead head;
  const ModHead::Row rows[2];

  __device__ __forceinline__ explicit ModLane(const ModPlace& at)
      : head(at.params, at.problem, at.sequence.number, at.query_head, at.sequence.used_queries, at.sequence.used_keys),
        rows{row_of(at, 0), row_of(at, 8)} {}

  __device__ __forceinline__ const ModLane& at(const ModPlace&) const { return *this; }

 private:
  __device__ __forceinline__ ModHead::Row row_of(const ModPlace& at, int below) const {
    const int lane = fresh_thread() % 32;
    return head.row(at.row + lane / 4 + below, at.column + lane % 4 * 2);
  }
};

// Replaces ModLane without a score_mod. The mods are computed where a mask is applied, since it takes long and most
// tiles need no mask.
struct DeferredModLane {
  __device__ __forceinline__ explicit DeferredModLane(const ModPlace&) {}
  __device__ __forceinline__ ModLane at(const ModPlace& place) const { return ModLane(place); }
};

// The mods of a step; empty in plain kernels. kCount: elements of a thread. kLate: products are kept until their slope
// is needed.
template <bool kEnabled, int kCount, bool kKeysAsRows, bool kLate>
struct ModStepOf {
  template <class Work>
  __device__ __forceinline__ ModStepOf(const Work&, int, int, int) {}
  template <bool kAsksMask>
  __device__ __forceinline__ void apply(float (&)[kCount]) const {}
  __device__ __forceinline__ void score(float (&)[4], float (&)[4], int) const {}
  __device__ __forceinline__ float weight(float p, int) const { return p; }
  __device__ __forceinline__ float gradient(float dp, int) const { return dp; }
  __device__ __forceinline__ float hidden_gradient(float ds, float) const { return ds; }
};

template <int kCount, bool kKeysAsRows, bool kLate>
struct ModStepOf<true, kCount, kKeysAsRows, kLate> {
  // Elements that are computed together. With kModsTogether these are all, because each piece waits for its loads. For
  // a mask_mod alone they are few: it may load from arrays, and most tiles need no mask.
  static constexpr int kPiece = 16, kPieceOfApply = kModsTogether ? kCount : kScoreMod ? kPiece : 4;

  const ModPlace place;
  const Select<kScoreMod, ModLane, DeferredModLane> lane;
  const Dropout dropout;
  unsigned kept[(kCount + 31) / 32] = {};  // bit i: dropout keeps the weight of element i

  // The mods of a query head. `row` is the warp's first row, `column` the tile's first column; if varlen, both count as
  // in VisibleRows.
  template <class Work>
  __device__ __forceinline__ ModStepOf(const Work& work, int query_head, int row, int column)
      : ModStepOf(work.params, work.whole_sequence(), query_head, row, column) {}

  // Turns products into scores, unless their slope is needed later. Hidden pairs become -inf; without kAsksMask the
  // mask_mod shows all.
  template <bool kAsksMask>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    if constexpr (kAsksMask || (kScoreMod && !kLate)) {
      const ModLane& mod_lane = lane.at(place);
      ModHead::Pair pair;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i > 0 && i % kPieceOfApply == 0) end_piece(place.problem.batch);
        const ModHead::Row& row = mod_lane.rows[i / 2 % 2];
        const int column = i / 4 * 8 + i % 2;
        if (i % 2 == 0) pair = mod_lane.head.pair(row, column);
        const ModHead::Result result = mod_lane.head.at(row, pair, s[i], column);
        if constexpr (kScoreMod && !kLate) s[i] = result.score;
        if constexpr (kAsksMask) s[i] = result.visible ? s[i] : -infinity();
      }
    }
  }

  // Turns products that were kept into scores, for elements 4 j … 4 j + 3, and returns their slopes.
  __device__ __forceinline__ void score(float (&s)[4], float (&slope)[4], int j) const {
    if ((kLate || kDropout) && j > 0 && 4 * j % kPiece == 0) end_piece(place.problem.batch);
    if constexpr (kLate) {
      const ModLane& mod_lane = lane.at(place);
      const ModHead::Pair pairs[2] = {mod_lane.head.pair(mod_lane.rows[0], j * 8),
                                      mod_lane.head.pair(mod_lane.rows[1], j * 8)};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const ModHead::Result result = mod_lane.head.at(mod_lane.rows[i / 2], pairs[i / 2], s[i], j * 8 + i % 2);
        s[i] = hidden_with(result.score, s[i]);
        slope[i] = result.slope;
      }
    }
  }

  // Returns ds of a pair, or zero if its weight is zero: dp and slope may be anything there.
  __device__ __forceinline__ float hidden_gradient(float ds, float p) const {
    return kSteepSlope && p == 0.0f ? 0.0f : ds;
  }

  // Of element i: the weight for dv, without dropout's scale, and the gradient of p.
  __device__ __forceinline__ float weight(float p, int i) const { return has(i) ? p : 0.0f; }
  __device__ __forceinline__ float gradient(float dp, int i) const {
    return kDropout ? (has(i) ? dp * dropout.scale() : 0.0f) : dp;
  }

 private:
  template <class Params>
  __device__ __forceinline__ ModStepOf(const Params& params, const WholeSequence& of, int query_head, int row,
                                       int column)
      : place{params,
              params.problem,
              of,
              query_head,
              row + (kKeysAsRows ? of.first_key : of.first_query),
              column + (kKeysAsRows ? of.first_query : of.first_key)},
        lane(place),
        dropout(params, of.number, query_head) {
    if constexpr (kDropout) {
      const int lane = fresh_thread() % 32;
      // Keys at any offset that are rows have one counter for each element, and together spill registers.
      constexpr bool kEach = kKeysAsRows && kIndexOffsets == IndexOffsets::kAny;
      if (kEach || (kVarlen && of.first_key % kKeysOfCounters != 0)) find_each_kept(place.row, place.column, lane);
      else find_kept(place.row, place.column, lane);
#pragma unroll
      for (unsigned& bits : kept) asm volatile("" : "+r"(bits));  // otherwise each bit takes a register of its own
    }
  }

  // Returns the score, or -inf if the product is -inf. The multiply-add is several times as fast as a comparison. The
  // comparison is used where the score of -inf may be inf or NaN.
  __device__ __forceinline__ static float hidden_with(float score, float product) {
    if constexpr (kSteepSlope || !kScoreModGrad) return product == -infinity() ? product : score;
    else return fmaf(product, 0x1p-126f, score);
  }

  // Finds the bits of dropout one by one, from any key on. This is rare: only index offsets, and a window that leaves
  // out first keys, shift the numbering.
  __device__ __forceinline__ void find_each_kept(int row, int column, int lane) {
    row += lane / 4, column += lane % 4 * 2;
#pragma unroll
    for (int word = 0; word < (kCount + 31) / 32; ++word) {
#pragma unroll 1
      for (int bit = 0; bit < const_min(kCount - 32 * word, 32); ++bit) {
        const int at_row = row + bit / 2 % 2 * 8, at_column = column + (32 * word + bit) / 4 * 8 + bit % 2;
        const bool keeps = kKeysAsRows ? dropout.keeps(at_column, at_row) : dropout.keeps(at_row, at_column);
        kept[word] |= static_cast<unsigned>(keeps) << bit;
      }
    }
  }

  __device__ __forceinline__ void find_kept(int row, int column, int lane) {
#pragma unroll
    for (int i = 0; i < kCount; i += kPiece) {
      if (i > 0) end_piece(place.problem.batch);
      Kept<kPiece> of_piece[1];
      if constexpr (kKeysAsRows) {
        dropout.kept_of_keys<false>(of_piece, row, column + 2 * i, lane);
      } else {
        of_piece[0] = dropout.kept<true, kPiece>(LaneQueries{row + lane / 4}, column + 2 * i, lane % 4);
      }
      kept[i / 32] |= of_piece[0].bits[0] << i % 32;
    }
  }

  __device__ __forceinline__ bool has(int i) const { return !kDropout || (kept[i / 32] >> i % 32 & 1); }
};
