// Scores and weights of calls with mods in a step of backward on Hopper: of a warp's 16 rows with a tile of columns.
// Rows are keys and columns queries, or the other way round.
//
// Where the slope of scores is not needed, scores are made at once, and become p beside dp. Where it is, products (or
// what the softcap made of them) are kept until dp is there, and the functions are asked once for score and slope. In
// both cases a pair that is hidden is -inf from the first on, its p is 0, and so is its ds. A score that weighs nothing
// needs no care: what lse is taken off it leaves no weight.
#pragma once
#include "../../common/dropout.cuh"
#include "../../common/fragment.cuh"
#include "../../common/mods.cuh"
#include "../../common/visible_rows.cuh"

// Whether ds needs what the functions were given, for their slope or for that of the softcap.
constexpr bool kNeedsScoreModGrad = kScoreModGrad || (kScoreMod && Score::kAlwaysChanges);

// Stands between pieces of what a thread works on. why: the compiler moves nothing across this instruction, which is
// never executed. Else it begins with so many elements at a time that registers spill. `count` is not negative.
__device__ __forceinline__ void end_piece(int count) {
  asm volatile("" : "+r"(count));  // why: known to be the same as before, it would be asked for only once
  if (count < 0) asm volatile("pmevent 1;" ::: "memory");
}

// Where a warp's 16 rows and a tile of columns lie.
struct ModPlace {
  const ModParams& params;
  const ProblemParams& problem;
  WholeSequence sequence;
  int query_head, row, column;
};

// What the functions know of a lane's two rows there. If scores need it, it is made before the products are there.
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

// Stands for a ModLane where scores need none: it is made where a mask is asked. why: it takes long, and most tiles ask
// no mask.
struct DeferredModLane {
  __device__ __forceinline__ explicit DeferredModLane(const ModPlace&) {}
  __device__ __forceinline__ ModLane at(const ModPlace& place) const { return ModLane(place); }
};

// What a step knows of them: nothing if there are none. kCount: elements of a thread. kLate: products are kept until
// their slope is needed.
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
  // Elements that may be worked on together. why all where it may be: each piece waits for what it loads. why so few of
  // a mask alone: it may read arrays, and most tiles ask no mask.
  static constexpr int kPiece = 16, kPieceOfApply = kModsTogether ? kCount : kScoreMod ? kPiece : 4;

  const ModPlace place;
  const Select<kScoreMod, ModLane, DeferredModLane> lane;
  const Dropout dropout;
  unsigned kept[(kCount + 31) / 32] = {};  // a bit for each element: whether dropout keeps its weight

  // The functions of a query head. `row` is the first one of the warp, `column` that of the tile; both are numbered as
  // in VisibleRows for variable-length sequences.
  template <class Work>
  __device__ __forceinline__ ModStepOf(const Work& work, int query_head, int row, int column)
      : ModStepOf(work.params, work.whole_sequence(), query_head, row, column) {}

  // Products become scores, or stay if their slope is needed. Those of hidden pairs become -inf; without kAsksMask the
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

  // Products of elements 4 j … 4 j + 3 become scores, if they have stayed until now; `slope` is then theirs.
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

  // ds of a pair, whose weight is zero where it is hidden. why: dp and slope may be anything there.
  __device__ __forceinline__ float hidden_gradient(float ds, float p) const {
    return kSteepSlope && p == 0.0f ? 0.0f : ds;
  }

  // Of element i: the weight that dv is made of, but for the scale of what dropout keeps, and the gradient of p.
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
      if (kVarlen && of.first_key % kKeysOfCounters != 0) find_each_kept(place.row, place.column, lane);
      else find_kept(place.row, place.column, lane);
#pragma unroll
      for (unsigned& bits : kept) asm volatile("" : "+r"(bits));  // why: else each bit is held in a register of its own
    }
  }

  // A score, or -inf if its product is. why not asked whether it is: that takes as long as several of these. why asked
  // all the same for some: the score of -inf may be inf or NaN there.
  __device__ __forceinline__ static float hidden_with(float score, float product) {
    if constexpr (kSteepSlope || !kScoreModGrad) return product == -infinity() ? product : score;
    else return fmaf(product, 0x1p-126f, score);
  }

  // Bits of what dropout keeps, found one by one, from any key on. It is rare: only the keys that a window leaves out
  // are not numbered.
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
