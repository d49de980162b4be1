// FlashAttention-2's softmax with a stale maximum (L42). The exponent is shifted by a past maximum of the row, and most
// key tiles look for no new one: the sums of the weights, which are made anyway, show whether one outweighs all others.
// A warp then scales the row to it, or computes the row again if its weights have left the range. The result is exact,
// and that of a row depends on no other row.
#pragma once
#include "../../common/fragment.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/mma_sync.cuh"
#include "../../common/mods.cuh"
#include "../../common/score.cuh"
#include "storage.cuh"

// bfloat16: the weight of a row's maximum is 2^-kBias when the maximum is found, and the sum of a lane stays under
// kSumLimit. So the sum of a row is always under 1, and p v under the largest |v|, whatever that is.
// float16: the weight of the maximum is 1, and the sum of a lane over one tile is at most 2^14. So weights are in the
// range of the type, which ends at 65504, and p v stays small in float32, because v is under 65504, too.
constexpr float kBias = kIsFloat16 ? 0.0f : 28.0f;
constexpr float kSumLimit = kIsFloat16 ? 16384.0f : 0.125f;
// The shift of a row that has seen nothing. why finite: exp2(-inf - shift) is then 0, and the first score overflows. Of
// scores of a score_mod those up to kLeastScore weigh nothing. Nothing is taken off them while the row has seen nothing
// else, and later a larger shift is, so that exp2 gives 0 for them in every row.
constexpr float kUnseen = kScoreMod ? kLeastScore : -1e38f;

// Whether maxima are updated in each tile. why for capped scores of large head dims: registers. why in lse: it
// recomputes no scores.
constexpr bool kAlwaysUpdatesMax = Score::kAlwaysChanges && (kHeadDim > 192 || kHeadDimV > 128 || kHeadDimV == 0);

// Whether rows are found in which some keys outweigh all others, so that their largest weight becomes exact (L42). why
// not with scores of a score_mod: registers.
constexpr bool kFindsPeaks = !kAlwaysUpdatesMax && !kScoreMod && kHeadDimV > 0;
constexpr float kUnit = kIsFloat16 ? 1.0f : 1.0f / 268435456.0f;  // 2^-kBias, the weight of a maximum when it is found
// A tile has a peak if the sum of some lane over it is larger. why so large: scores of size 1 and 2 have none, unless
// the first maximum is that of fewer than kFewKeys keys. So the sum of a row is under 1 in bfloat16, as above, in 2^12
// tiles.
constexpr float kPeak = 1024.0f * kUnit, kPeakOfFew = 32768.0f * kUnit;
constexpr int kFewKeys = 16;
constexpr bool kPacksLimits = kVarlen && kHeadDim > 192;  // why: registers
// Weights of tiles with a larger sum are made again instead of scaled down. why: what they are scaled by would be 0.
constexpr float kMostScaled = 4e37f * kUnit;  // 2^125

using Query = unsigned[kQSteps > 0 ? kQSteps : 1][4];  // fragments of a warp's rows of q, as mma.sync takes them

// Whether it is so in one of the four lanes that hold a row.
__device__ __forceinline__ bool in_some_lane(bool here) {
  return __ballot_sync(0xffffffffu, here) >> (fresh_thread() % 32 & ~3) & 15;
}

struct Softmax {
  float shift[2];                      // a past maximum of score * scale_log2, + kBias
  float sum[2];                        // over this lane's columns
  float limits[kPacksLimits ? 1 : 2];  // see limit(h)

  __device__ __forceinline__ void setup() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shift[h] = kUnseen, sum[h] = 0.0f;
      if constexpr (kFindsPeaks) set_limit(h, kPeak);
    }
  }

  // Where kFindsPeaks, a larger sum of a lane over one tile is a peak in row h.
  __device__ __forceinline__ float limit(int h) const {
    if constexpr (!kPacksLimits) return limits[h];
    const unsigned both = __float_as_uint(limits[0]);  // upper halves
    return __uint_as_float(h == 0 ? both << 16 : both & 0xffff0000u);
  }

  // Keeps the upper 16 bits. why in all kernels: one that kept more would not scale the same rows (L42).
  __device__ __forceinline__ void set_limit(int h, float limit) {
    const unsigned bits = __float_as_uint(limit);
    if constexpr (kPacksLimits) {
      limits[0] = __uint_as_float(__byte_perm(__float_as_uint(limits[0]), bits, h == 0 ? 0x3276 : 0x7610));
    } else {
      limits[h] = __uint_as_float(bits & 0xffff0000u);
    }
  }

  // Sets the limits of rows whose first maximum is that of few keys.
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

  // Updates the shifts to the maxima of these scores. The caller multiplies the output so far by o_scale; the sums are
  // multiplied here.
  template <int kCount>
  __device__ __forceinline__ void update_max(const float (&s)[kCount], float scale_log2, float (&o_scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) update_row_max(h, quad_max(lane_row_max(s, h)), scale_log2, o_scale[h]);
  }

  // The same for rows that have seen nothing yet, of which neither the sums nor the output need a factor.
  template <int kCount>
  __device__ __forceinline__ void update_max_if_unseen(const float (&s)[kCount], float scale_log2) {
    if (!__any_sync(0xffffffffu, shift[0] == kUnseen | shift[1] == kUnseen)) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float row_max = quad_max(lane_row_max(s, h));
      if (shift[h] == kUnseen) shift[h] = fmaxf(kUnseen, fmaf(row_max, scale_log2, kBias));
    }
  }

  // Whether the shift of row h is taken off scores of a score_mod as they are made. It is not if the row has seen
  // nothing yet, nor if it is large. why: inside a score's last multiplication and addition it is rounded otherwise
  // than off a score that is made, while tiles of both kinds add to the same row: by up to 2^-11 of a weight at this
  // bound.
  __device__ __forceinline__ bool is_taken_off(int h) const { return fabsf(shift[h]) < 16384.0f; }

  // What is taken off scores as they are made. kBeginsRows: update_max_of_exponents does what is then left to do, and
  // without it put_out_of_range.
  template <bool kBeginsRows>
  __device__ __forceinline__ float2 taken_off() const {
    if constexpr (!kBeginsRows) return {shift[0], shift[1]};
    return {is_taken_off(0) ? shift[0] : 0.0f, is_taken_off(1) ? shift[1] : 0.0f};
  }

  // Makes an exponent of each row that is_taken_off not infinite, and so its sum, as its weights are to be made again.
  template <int kCount>
  __device__ __forceinline__ void put_out_of_range(float (&s)[kCount]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (!is_taken_off(h)) s[kCount - 3 + 2 * h] = infinity();
  }

  // What makes exponents of whole scores of row h.
  __device__ __forceinline__ float base(int h) const { return kScoreMod && shift[h] == kUnseen ? 0.0f : shift[h]; }

  // As update_max_if_unseen, for scores less taken_off, which become exponents.
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

  // Scores, or exponents, become weights. `sums` becomes their sums over this lane's columns.
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

  // The sums of weights, added as `exponentiate` does.
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

  // Whether weights of row h with this sum have left the range, or have a peak. NaN has not: it is the result.
  __device__ __forceinline__ bool out_of_range(int h, float tile_sum) const {
    if constexpr (kFindsPeaks) return tile_sum > limit(h);
    return (kIsFloat16 ? tile_sum : sum[h] + tile_sum) > kSumLimit;
  }

  // Takes the shifts of rows out of range from their largest weights, to which the weights and all sums are then
  // scaled. The caller multiplies the output so far by o_scale. `again` becomes the rows whose weights are too large
  // for it, and the result is whether there are any in the warp.
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
        // why not the reciprocal of `most`: the shift is rounded.
        o_scale[h] = scales ? exp2_approx(shift[h] - updated) : 1.0f;
        shift[h] = scales ? updated : shift[h];
        sum[h] *= o_scale[h], sums[h] *= o_scale[h];
        scale_row(s, h, o_scale[h]);
        // why: the largest weight is to stay the unit as long as few keys make up the sum.
        if (again[h]) set_limit(h, scales ? fmaxf(kUnit, 0.5f * (sum[h] + sums[h])) : kUnit);
        again[h] = too_large;
      }
    }
    return __any_sync(0xffffffffu, again[0] | again[1]);
  }

  // Gives the factor that turns the accumulated output into the result, and the row's lse.
  __device__ __forceinline__ void finish(int h, float& o_scale, float& lse) const {
    const float total = quad_sum(sum[h]);
    o_scale = total == 0.0f ? 0.0f : rcp_approx(total);
    lse = Softmax::lse(total, shift[h]);
  }

  __device__ __forceinline__ static float lse(float total, float shift) {
    return total == 0.0f ? -infinity() : (shift - kBias + log2_approx(total * (1.0f / kUnit))) * kLn2;
  }
};

// Makes the scores of a warp's 16 rows with 16 keys once more. why by mma.sync: it needs no other warp, and has the
// fragments of wgmma. q_smem and k_smem are the warp's rows and the first key in the first panel.
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

// Makes the weights of the rows `again` once more; other rows stay as they are. The sums are added. It is rare.
// finish(products, piece) makes scores of the products of 16 keys, and hides those of keys that are not seen.
template <int kCount, class Finish>
__device__ __forceinline__ void recompute_tile_weights(float (&s)[kCount], Softmax& softmax, const float (&sums)[2],
                                                       const bool (&again)[2], float (&o_scale)[2], Finish finish,
                                                       float scale_log2, const Query& q, unsigned q_smem,
                                                       unsigned k_smem) {
  constexpr int kPieces = kCount / 8;  // of 16 keys
  float row_max[2], tile_sum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row_max[h] = -infinity(), tile_sum[h] = again[h] ? 0.0f : sums[h];
  // The first half of the loop finds the maxima, the second makes the weights. One loop compiles faster, and it is rare
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
