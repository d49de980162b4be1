// Scores and weights of the caller's own in a step of backward on Hopper: of a warp's 16 rows with a tile of columns.
// Rows are keys and columns queries, or the other way round.
//
// Where the slope of scores is not needed, scores are made at once, and become p beside dp. Where it is, products (or
// what the softcap made of them) are kept until dp is there, and the functions are asked once for score and slope. In
// both cases a pair that is hidden is -inf from the first on, its p is 0, and so is its ds.
#pragma once
#include "../common/dropout.cuh"
#include "../common/fragment.cuh"
#include "../common/own_scores.cuh"

static_assert(!kOwn || !kLengths, "the functions are not told of sequences of several lengths");

// Whether ds needs what the functions were given, for their slope or for that of the softcap.
constexpr bool kOwnNeedsSlope = kOwnSlope || (kOwnScores && Score::kAlwaysChanges);

// Stands between pieces of what a thread works on. why: the compiler moves nothing across this instruction, which is
// never executed. Else it begins with so many elements at a time that registers spill. `count` is not negative.
__device__ __forceinline__ void end_piece(int count) {
  asm volatile("" : "+r"(count));  // why: known to be the same as before, it would be asked for only once
  if (count < 0) asm volatile("pmevent 1;" ::: "memory");
}

// What a step knows of them: nothing if there are none. kCount: elements of a thread. kLate: products are kept until
// their slope is needed.
template <bool kExists, int kCount, bool kRowsAreKeys, bool kLate>
struct OwnStepOf {
  template <class Work>
  __device__ __forceinline__ OwnStepOf(const Work&, int, int, int) {}
  template <bool kAsksMask>
  __device__ __forceinline__ void apply(float (&)[kCount]) const {}
  __device__ __forceinline__ void score(float (&)[4], float (&)[4], int) const {}
  __device__ __forceinline__ float weight(float p, int) const { return p; }
  __device__ __forceinline__ float gradient(float dp, int) const { return dp; }
};

template <int kCount, bool kRowsAreKeys, bool kLate>
struct OwnStepOf<true, kCount, kRowsAreKeys, kLate> {
  static constexpr int kPiece = 16;  // elements that may be worked on together

  const ProblemParams& problem;
  const OwnHead head;
  const OwnHead::Row rows[2];  // the lane's
  const Dropout dropout;
  unsigned kept[(kCount + 31) / 32] = {};  // a bit for each element: whether dropout keeps its weight

  // The functions of a query head. `row` is the first one of the warp, `column` that of the tile.
  template <class Work>
  __device__ __forceinline__ OwnStepOf(const Work& work, int query_head, int row, int column)
      : OwnStepOf(work, query_head, row, column, fresh_thread() % 32) {}

  // Products become scores, or stay if their slope is needed. Those of hidden pairs become -inf; without kAsksMask the
  // caller's mask shows all.
  template <bool kAsksMask>
  __device__ __forceinline__ void apply(float (&s)[kCount]) const {
    if constexpr (kAsksMask || (kOwnScores && !kLate)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i > 0 && i % kPiece == 0) end_piece(problem.batch);
        const OwnHead::Result result = head.at(rows[i / 2 % 2], s[i], i / 4 * 8 + i % 2);
        if constexpr (kOwnScores && !kLate) s[i] = result.score <= kLeastScore ? -infinity() : result.score;
        if constexpr (kAsksMask) s[i] = result.visible ? s[i] : -infinity();
      }
    }
  }

  // Products of elements 4 j … 4 j + 3 become scores, if they have stayed until now; `slope` is then theirs.
  __device__ __forceinline__ void score(float (&s)[4], float (&slope)[4], int j) const {
    if ((kLate || kDropout) && j > 0 && 4 * j % kPiece == 0) end_piece(problem.batch);
    if constexpr (kLate) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const OwnHead::Result result = head.at(rows[i / 2], s[i], j * 8 + i % 2);
        const bool hidden = s[i] == -infinity();  // why not its score: of -inf, it may be anything
        s[i] = hidden || result.score <= kLeastScore ? -infinity() : result.score;
        slope[i] = result.slope;
      }
    }
  }

  // Of element i: the weight that dv is made of, but for the scale of what dropout keeps, and the gradient of p.
  __device__ __forceinline__ float weight(float p, int i) const { return has(i) ? p : 0.0f; }
  __device__ __forceinline__ float gradient(float dp, int i) const {
    return kDropout ? (has(i) ? dp * dropout.scale() : 0.0f) : dp;
  }

 private:
  template <class Work>
  __device__ __forceinline__ OwnStepOf(const Work& work, int query_head, int row, int column, int lane)
      : problem(work.params.problem),
        head(work.params, problem, work.batch, query_head, problem.seqlen_q, problem.seqlen_k),
        rows{head.row(row + lane / 4, column + lane % 4 * 2), head.row(row + lane / 4 + 8, column + lane % 4 * 2)},
        dropout(work.params, work.batch, query_head) {
    if constexpr (kDropout) find_kept(row, column, lane);
  }

  __device__ __forceinline__ void find_kept(int row, int column, int lane) {
#pragma unroll
    for (int i = 0; i < kCount; i += kPiece) {
      if (i > 0) end_piece(problem.batch);
      Kept<kPiece> of_piece[1];
      if constexpr (kRowsAreKeys) {
        dropout.kept_of_keys<false>(of_piece, row, column + 2 * i, lane);
      } else {
        of_piece[0] = dropout.kept<true, kPiece>(LaneQueries{row + lane / 4}, column + 2 * i, lane % 4);
      }
      kept[i / 32] |= of_piece[0].bits[0] << i % 32;
    }
#pragma unroll
    for (unsigned& bits : kept) asm volatile("" : "+r"(bits));  // why: else each bit is held in a register of its own
  }

  __device__ __forceinline__ bool has(int i) const { return !kDropout || (kept[i / 32] >> i % 32 & 1); }
};
