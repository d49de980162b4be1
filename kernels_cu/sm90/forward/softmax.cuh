// FlashAttention-2's softmax with a stale maximum (L42). Exponents are shifted by a past maximum of the row, and most
// key tiles compute no new one. The sums of weights, which are needed anyway, show if one weight outweighs all others.
// A warp then scales the row to that weight, or recomputes the row if its weights have left the range. The result is
// exact, and a row's result depends on no other row.
#pragma once
#include "../../common/fragment.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/mma_sync.cuh"
#include "../../common/mods.cuh"
#include "../../common/score.cuh"
#include "storage.cuh"

// bfloat16: the weight of a row's maximum is 2^-kBias when the maximum is computed, and a lane's sum stays under
// kSumLimit. So the sum of a row is always under 1, and p v under the largest |v|.
//
// float16: the weight of the maximum is 1, and a lane's sum over one tile is at most 2^14. So weights stay in the range
// of float16, which ends at 65504, and p v is small in float32, as v is below 65504.
constexpr float kBias = kIsFloat16 ? 0.0f : 28.0f;
constexpr float kSumLimit = kIsFloat16 ? 16384.0f : 0.125f;
// The initial shift of a row. It is finite, so that exp2(-inf - shift) is 0 and the first score overflows. Scores of a
// score_mod up to kLeastScore weigh nothing. They are not shifted until the row has a larger score, and then by that
// row's shift. So exp2 gives 0 for them in every row.
constexpr float kUnseen = kScoreMod ? kLeastScore : -1e38f;

// True if each tile updates the maximum: with a softcap, in large head dims for lack of registers, and in lse, which
// recomputes no scores.
constexpr bool kAlwaysUpdatesMax = Score::kAlwaysChanges && (kHeadDim > 192 || kHeadDimV > 128 || kHeadDimV == 0);

// True if rows are scaled down when few keys outweigh all others, so that their largest weight is exact (L42). Kernels
// with a score_mod have no registers for it.
constexpr bool kFindsPeaks = !kAlwaysUpdatesMax && !kScoreMod && kHeadDimV > 0;
constexpr float kUnit = kIsFloat16 ? 1.0f : 1.0f / 268435456.0f;  // 2^-kBias, the weight of a new maximum
// A tile has a peak if some lane's sum over it exceeds the limit. Scores of size 1 and 2 have none, unless the first
// maximum is over fewer than kFewKeys keys. In bfloat16 a row's sum then stays under 1 for 2^12 tiles.
constexpr float kPeak = 1024.0f * kUnit, kPeakOfFew = 32768.0f * kUnit;
constexpr int kFewKeys = 16;
constexpr bool kPacksLimits = kVarlen && kHeadDim > 192;  // both limits share a register, as no other is free
// Weights of tiles with a larger sum are recomputed, not scaled down: their scale would be 0.
constexpr float kMostScaled = 4e37f * kUnit;  // 2^125

using Query = unsigned[kQSteps > 0 ? kQSteps : 1][4];  // fragments of a warp's rows of q for mma.sync

// True if the predicate holds in any of the four lanes that hold a row.
__device__ __forceinline__ bool in_some_lane(bool here) {
  return __ballot_sync(0xffffffffu, here) >> (fresh_thread() % 32 & ~3) & 15;
}

struct Softmax {
  float shift[2];                      // a past maximum of score * scale_log2, plus kBias
  float sum[2];                        // over this lane's columns
  float limits[kPacksLimits ? 1 : 2];  // read by limit(h)

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shift[h] = kUnseen, sum[h] = 0.0f;
      if constexpr (kFindsPeaks) set_limit(h, kPeak);
    }
  }

  // Returns the largest sum of a lane over one tile that is no peak in row h. Used with kFindsPeaks.
  __device__ __forceinline__ float limit(int h) const {
    if constexpr (!kPacksLimits) return limits[h];
    const unsigned both = __float_as_uint(limits[0]);  // each limit is the upper half of a float
    return __uint_as_float(h == 0 ? both << 16 : both & 0xffff0000u);
  }

  // Sets the limit of row h to a number whose lower 16 bits are 0.
  __device__ __forceinline__ void set_limit(int h, float limit) {
    if constexpr (kPacksLimits) {
      limits[0] =
          __uint_as_float(__byte_perm(__float_as_uint(limits[0]), __float_as_uint(limit), h == 0 ? 0x3276 : 0x7610));
    } else {
      limits[h] = limit;
    }
  }

  // Raises the limits of rows whose first maximum is over few keys.
  template <class Queries>
  __device__ __forceinline__ void begin_with_few(Queries rows, const Mask& mask) {
    if constexpr (kFindsPeaks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const unsigned last = mask.end(rows[h]) - 1;
        if (last % kBlockK < kFewKeys - 1) set_limit(h, kPeakOfFew);
      }
    }
  }

  // Updates the shifts to the maxima of these scores, and scales the sums. The caller multiplies o by o_scale.
  template <int kCount>
  __device__ __forceinline__ void update_max(const float (&s)[kCount], float scale_log2, float (&o_scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) update_row_max(h, quad_max(lane_row_max(s, h)), scale_log2, o_scale[h]);
  }

  // As update_max, for rows without a visible key so far, whose sums and output need no factor.
  template <int kCount>
  __device__ __forceinline__ void update_max_if_unseen(const float (&s)[kCount], float scale_log2) {
    if (!__any_sync(0xffffffffu, shift[0] == kUnseen | shift[1] == kUnseen)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_max = quad_max(lane_row_max(s, h));
      if (shift[h] == kUnseen) shift[h] = fmaxf(kUnseen, fmaf(row_max, scale_log2, kBias));
    }
  }

  // True if row h's shift is subtracted within a score_mod's last multiply-add. False if the row has seen nothing, or
  // if the shift is large. A fused subtraction rounds differently from a later one, and tiles of both kinds add to the
  // same row. At this bound the difference is up to 2^-11 of a weight.
  __device__ __forceinline__ bool is_taken_off(int h) const { return fabsf(shift[h]) < 16384.0f; }

  // Returns the amounts that score_mod subtracts from its scores. With kBeginsRows, update_max_of_exponents subtracts
  // the rest. Otherwise put_out_of_range marks the rows with a wrong amount.
  template <bool kBeginsRows>
  __device__ __forceinline__ float2 taken_off() const {
    if constexpr (!kBeginsRows) return {shift[0], shift[1]};
    return {is_taken_off(0) ? shift[0] : 0.0f, is_taken_off(1) ? shift[1] : 0.0f};
  }

  // Sets an exponent, and so the sum, of each row that is not is_taken_off to infinity: its weights must be recomputed.
  template <int kCount>
  __device__ __forceinline__ void put_out_of_range(float (&s)[kCount]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!is_taken_off(h)) s[kCount - 3 + 2 * h] = infinity();
  }

  // Returns the amount to subtract from whole scores of row h.
  __device__ __forceinline__ float base(int h) const { return kScoreMod && shift[h] == kUnseen ? 0.0f : shift[h]; }

  // As update_max_if_unseen, for scores reduced by taken_off, which become exponents.
  template <int kCount>
  __device__ __forceinline__ void update_max_of_exponents(float (&s)[kCount]) {
    if (!__any_sync(0xffffffffu, !is_taken_off(0) | !is_taken_off(1))) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_max = quad_max(lane_row_max(s, h));
      const bool is_whole = !is_taken_off(h);
      if (shift[h] == kUnseen) shift[h] = fmaxf(kUnseen, row_max + kBias);
      const float less = is_whole ? base(h) : 0.0f;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) s[4 * j + 2 * h] -= less, s[4 * j + 2 * h + 1] -= less;
    }
  }

  __device__ __forceinline__ void update_row_max(int h, float row_max, float scale_log2, float& o_scale) {
    const float updated = fmaxf(shift[h], fmaf(row_max, scale_log2, kBias));
    o_scale = exp2_approx(shift[h] - updated);
    shift[h] = updated;
    sum[h] *= o_scale;
  }

  // Turns scores, or exponents, into weights, and returns their sums over this lane's columns in `sums`.
  template <bool kOfExponents = false, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], float scale_log2, float (&sums)[2]) const {
    const float less[2] = {base(0), base(1)};
    float odd[2] = {};
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[4 * j + i] = exp2_approx(kOfExponents ? s[4 * j + i] : fmaf(s[4 * j + i], scale_log2, -less[i / 2]));
      }
      sums[0] += s[4 * j], odd[0] += s[4 * j + 1], sums[1] += s[4 * j + 2], odd[1] += s[4 * j + 3];
    }
    sums[0] += odd[0], sums[1] += odd[1];
  }

  // Sums weights in the order of `exponentiate`.
  template <int kCount>
  __device__ __forceinline__ static void sum_up(const float (&s)[kCount], float (&sums)[2]) {
    float odd[2] = {};
    sums[0] = sums[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      sums[0] += s[4 * j], odd[0] += s[4 * j + 1], sums[1] += s[4 * j + 2], odd[1] += s[4 * j + 3];
    }
    sums[0] += odd[0], sums[1] += odd[1];
  }

  __device__ __forceinline__ void add(const float (&sums)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] += sums[h];
  }

  // True if weights of row h with this sum have left the range, or have a peak. False for NaN, which is the result.
  __device__ __forceinline__ bool out_of_range(int h, float tile_sum) const {
    if constexpr (kFindsPeaks) return tile_sum > limit(h);
    return (kIsFloat16 ? tile_sum : sum[h] + tile_sum) > kSumLimit;
  }

  // Scales weights and sums of rows out of range to their largest weights, which give new shifts. The caller multiplies
  // o by o_scale. `again` marks the rows whose weights are too large for this. Returns true if the warp has any.
  template <int kCount>
  __device__ __forceinline__ bool scale_down(float (&s)[kCount], float (&sums)[2], bool (&again)[2],
                                             float (&o_scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) again[h] = in_some_lane(out_of_range(h, sums[h])), o_scale[h] = 1.0f;
    if constexpr (kFindsPeaks) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool too_large = in_some_lane(sums[h] > kMostScaled), scales = again[h] && !too_large;
        const float most = fmaxf(quad_max(lane_row_max(s, h)), kUnit);
        const float updated = shift[h] + log2_approx(most * (1.0f / kUnit));
        // Not the reciprocal of `most`, because the shift is rounded.
        o_scale[h] = scales ? exp2_approx(shift[h] - updated) : 1.0f;
        shift[h] = scales ? updated : shift[h];
        sum[h] *= o_scale[h], sums[h] *= o_scale[h];
        scale_row(s, h, o_scale[h]);
        // The largest weight stays the unit while few keys make up the sum. The limit has 16 bits in all kernels, as
        // more bits would make a kernel scale other rows (L42).
        const float half_sum = __uint_as_float(__float_as_uint(0.5f * (sum[h] + sums[h])) & 0xffff0000u);
        if (again[h]) set_limit(h, scales ? fmaxf(kUnit, half_sum) : kUnit);
        again[h] = too_large;
      }
    }
    return __any_sync(0xffffffffu, again[0] | again[1]);
  }

  // Computes the factor that normalises o, and the row's lse.
  __device__ __forceinline__ void finish(int h, float& o_scale, float& lse) const {
    const float total = quad_sum(sum[h]);
    o_scale = total == 0.0f ? 0.0f : rcp_approx(total);
    lse = Softmax::lse(total, shift[h]);
  }

  __device__ __forceinline__ static float lse(float total, float shift) {
    return total == 0.0f ? -infinity() : (shift - kBias + log2_approx(total * (1.0f / kUnit))) * kLn2;
  }
};

// Recomputes the products of a warp's 16 rows with 16 keys. mma.sync needs no other warp, and has wgmma's fragments.
// q_smem and k_smem are the warp's rows and the first key in the first panel.
__device__ __forceinline__ void recompute_scores(float (&s)[8], const Query& q, unsigned q_smem, unsigned k_smem) {
  using Panel = Swizzle<8>;
  const int lane = fresh_thread() % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = 0.0f;
#pragma unroll(kQInRegisters ? kQSteps : 1)
  for (int kk = 0; kk < kHeadDim / 16; ++kk) {
    const int panel = kk / 4, chunk = kk % 4 * 2;
    unsigned a[4], b[4];
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[kk][i];
    } else {
      ldmatrix_x4(a, q_smem + panel * kPanelBytesQ + Panel::offset(lane % 16, chunk + lane / 16));
    }
    ldmatrix_x4(b, k_smem + panel * kPanelBytesK + Panel::offset(lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
    mma_sync_m16n8k16<kIsFloat16>(s, a, b[0], b[1]);
    mma_sync_m16n8k16<kIsFloat16>(s + 4, a, b[2], b[3]);
  }
}

// Recomputes the weights of the rows `again`, which is rare; other rows keep theirs. All sums are added.
// finish(products, piece) turns the products of 16 keys into scores, and masked ones into -inf.
template <int kCount, class Finish>
__device__ __forceinline__ void recompute_tile_weights(float (&s)[kCount], Softmax& softmax, const float (&sums)[2],
                                                       const bool (&again)[2], float (&o_scale)[2], Finish finish,
                                                       float scale_log2, const Query& q, unsigned q_smem,
                                                       unsigned k_smem) {
  constexpr int kPieces = kCount / 8;  // pieces of 16 keys
  float row_max[2], tile_sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row_max[h] = -infinity(), tile_sum[h] = again[h] ? 0.0f : sums[h];
  // The first half of the loop computes the maxima, the second the weights. One loop compiles faster, and this is rare
  // (L16).
#pragma unroll 1
  for (int n = 0; n < 2 * kPieces; ++n) {
    const int piece = n % kPieces;
    float fresh[8];
    recompute_scores(fresh, q, q_smem, k_smem + piece * 16 * 128);
    finish(fresh, piece);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (n < kPieces) {
        row_max[h] = fmaxf(row_max[h], lane_row_max(fresh, h));
        if (n < kPieces - 1) continue;
        row_max[h] = quad_max(row_max[h]);
        if (again[h]) softmax.update_row_max(h, row_max[h], scale_log2, o_scale[h]);
      } else if (again[h]) {
        tile_sum[h] += exponentiate_row(fresh, h, scale_log2, softmax.base(h));
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 4 * (i / 2) + 2 * h + i % 2;
            s[8 * j + at] = j == piece ? fresh[at] : s[8 * j + at];
          }
        }
      }
    }
  }
  softmax.add(tile_sum);
}
