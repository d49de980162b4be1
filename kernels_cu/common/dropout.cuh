// Dropout by Philox4x32-10, bit for bit as in cuflash/reference/dropout.py. Key k of query q belongs to the counter (4
// (k / 32) + k % 8 / 2, q, head, sequence). Of its four words it takes half k % 2 of word k / 8 % 4. A weight is kept
// if these 16 bits are below kept_share, which is 1 to 2^16.
//
// Dropped weights become zero. Kept weights are multiplied by scale() later, at a point where the kernel multiplies
// anyway: scaled at once, float16 weights might overflow.
//
// Index offsets are added to q, k, head and sequence (kIndexOffsets). If that of keys is no multiple of 32, a lane
// finds the counter and the word of its keys at run time. Neighbouring keys may then have different counters, and each
// takes one more counter for 128 keys or less: 2.5 to 4 times as many random numbers.
#pragma once
#include "params.cuh"

constexpr int kKeysOfCounters = 32;  // keys of a group of neighbouring counters; it begins at a multiple of this

struct PhiloxWords {
  unsigned words[4];
};

__device__ __forceinline__ PhiloxWords philox(PhiloxWords x, unsigned key, unsigned other_key) {
  unsigned (&w)[4] = x.words;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned long long one = w[0] * 0xD2511F53ull, other = w[2] * 0xCD9E8D57ull;
    w[0] = static_cast<unsigned>(other >> 32) ^ w[1] ^ key, w[1] = static_cast<unsigned>(other);
    w[2] = static_cast<unsigned>(one >> 32) ^ w[3] ^ other_key, w[3] = static_cast<unsigned>(one);
    key += 0x9E3779B9u, other_key += 0xBB67AE85u;
  }
  return x;
}

// The kept weights of a fragment: one bit per register.
template <int kCount>
struct Kept {
  unsigned bits[(kCount + 31) / 32] = {};

  __device__ __forceinline__ bool has(int i) const { return !kDropout || (bits[i / 32] >> i % 32 & 1); }
  __device__ __forceinline__ void set(int i, bool kept) { bits[i / 32] |= static_cast<unsigned>(kept) << i % 32; }
};

// Dropout of one query head of a sequence; without dropout all weights are kept. A template, because the parameters of
// kernels without mods have no seed.
template <class Params>
struct DropoutOf {
  const Params& mod_params;
  const unsigned sequence, head;
  unsigned seed[2];

  __device__ __forceinline__ DropoutOf(const Params& params, int sequence_idx, int query_head)
      : mod_params(params), sequence(sequence_idx + offset<3>(params)), head(query_head + offset<2>(params)) {
    if constexpr (kDropout) seed[0] = __ldg(params.seed), seed[1] = __ldg(params.seed + 1);
  }

  // Returns the factor of kept weights.
  __device__ __forceinline__ float scale() const {
    if constexpr (kDropout) return mod_params.kept_scale;
    else return 1.0f;
  }

  // True if the weight is kept.
  __device__ __forceinline__ bool keeps(int query, int key) const {
    key += any_key_offset();
    const PhiloxWords x = words_of(key / 32, key % 8 / 2, query);
    const unsigned of_first = key / 8 % 2 == 0 ? x.words[0] : x.words[1];  // selected: an index would need local memory
    const unsigned of_second = key / 8 % 2 == 0 ? x.words[2] : x.words[3];
    return is_kept(key / 16 % 2 == 0 ? of_first : of_second, key % 2);
  }

  // Zeroes the dropped weights of a fragment whose rows are queries. `rows` are the lane's two rows, `key` is the first
  // column (a multiple of 16), and column_pair = lane % 4. kAligned: `key` is a multiple of 32.
  template <bool kAligned, int kCount, class Rows>
  __device__ __forceinline__ void drop(float (&weights)[kCount], Rows rows, int key, int column_pair) const {
    const auto zero_dropped = [&](int i, bool kept) { weights[i] = kept ? weights[i] : 0.0f; };
    if constexpr (kDropout) visit<kAligned, kCount>(rows, key, column_pair, zero_dropped);
  }

  // Returns the kept weights of such a fragment as bits.
  template <bool kAligned, int kCount, class Rows>
  __device__ __forceinline__ Kept<kCount> kept(Rows rows, int key, int column_pair) const {
    Kept<kCount> result;
    const auto set = [&](int i, bool kept) { result.set(i, kept); };
    if constexpr (kDropout) visit<kAligned, kCount>(rows, key, column_pair, set);
    return result;
  }

  // Returns the kept weights of consecutive fragments of 16 keys whose rows are keys, from `key` on; `query` is the
  // first column. All lanes of a warp call it: a counter serves two neighbouring keys, which two lanes hold, so the
  // lanes exchange bits.
  template <bool kAligned, int kFragments, int kCount>
  __device__ __forceinline__ void kept_of_keys(Kept<kCount> (&kept)[kFragments], int key, int query, int lane) const {
    if constexpr (kDropout && kIndexOffsets == IndexOffsets::kAny) {
      const int first = key + any_key_offset() + lane / 4;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const int column = 8 * (i / 2) + 2 * (lane % 4) + i % 2;
        visit_each_8th<2 * kFragments>(
            first, query + column, [&](int n, bool stays) { kept[n / 2].set(i / 2 * 4 + n % 2 * 2 + i % 2, stays); });
      }
    } else if constexpr (kDropout) {
      constexpr int kStep = kAligned && kFragments % 2 == 0 ? 2 : 1;  // fragments per counter
      const int row = lane / 4, is_odd = row % 2;
      const unsigned this_half = is_odd ? 0x7632 : 0x5410, other_half = is_odd ? 0x5410 : 0x7632;
#pragma unroll
      for (int m = 0; m < kFragments; m += kStep) {
        const int first = key + 16 * m;
#pragma unroll
        for (int j = 0; j < kCount / 4; ++j) {
          // Of the two queries of these columns, the lane of an even key takes the first, the lane of an odd key the
          // second.
          const PhiloxWords x = words_of(first / 32, row / 2, query + 8 * j + 2 * (lane % 4) + is_odd);
#pragma unroll
          for (int n = 0; n < kStep; ++n) {
            const bool second = kStep == 2 ? n == 1 : first / 16 % 2 == 1;
            const unsigned upper = second ? x.words[2] : x.words[0], lower = second ? x.words[3] : x.words[1];
            const unsigned mine = __byte_perm(upper, lower, this_half);
            const unsigned got = __shfl_xor_sync(0xffffffffu, __byte_perm(upper, lower, other_half), 4);
            const unsigned of_columns[2] = {is_odd ? got : mine, is_odd ? mine : got};
#pragma unroll
            for (int i = 0; i < 4; ++i) kept[m + n].set(4 * j + i, is_kept(of_columns[i % 2], i / 2));
          }
        }
      }
    }
  }

 private:
  // Returns the offset of queries (0), keys (1), heads (2) or sequences (3).
  template <int kAxis>
  __device__ __forceinline__ static int offset(const Params& params) {
    if constexpr (kDropout && kIndexOffsets != IndexOffsets::kNone) return params.index_offsets[kAxis];
    else return 0;
  }

  // Returns the offset of keys, if groups of counters do not begin at multiples of it.
  __device__ __forceinline__ int any_key_offset() const {
    return kIndexOffsets == IndexOffsets::kAny ? offset<1>(mod_params) : 0;
  }

  __device__ __forceinline__ PhiloxWords words_of(int group, int pair, int query) const {
    const int first = kIndexOffsets == IndexOffsets::kAligned ? offset<1>(mod_params) / 32 : 0;
    const unsigned row = query + offset<0>(mod_params);
    return philox({{4u * (first + group) + pair, row, head, sequence}}, seed[0], seed[1]);
  }

  // Visits the key at index `key`, which includes the offset, and each 8th key after it, kKeys in all.
  template <int kKeys, class Visit>
  __device__ __forceinline__ void visit_each_8th(int key, int query, const Visit& visit_key) const {
    constexpr int kPiece = 16;  // keys whose bits, with three before or after them, fit into a word
#pragma unroll
    for (int n = 0; n < kKeys; n += kPiece) {
      unsigned bits = 0;
#pragma unroll 1  // unrolled, several counters at once spill registers
      for (int m = 0; m < kPiece / 4 + 1 && 4 * m < kKeys - n + 3; ++m) {
        const PhiloxWords x = words_of(key / 32 + n / 4 + m, key % 8 / 2, query);
#pragma unroll
        for (int i = 0; i < 4; ++i) bits |= static_cast<unsigned>(is_kept(x.words[i], key % 2)) << (4 * m + i);
      }
      bits >>= key / 8 % 4;
#pragma unroll
      for (int i = 0; i < kPiece && n + i < kKeys; ++i) visit_key(n + i, (bits >> i & 1) != 0);
    }
  }

  __device__ __forceinline__ bool is_kept(unsigned word, int half) const {
    // Compared in the upper half of a word: the lower half cannot change the result, so every second weight needs no
    // shift.
    const unsigned last = (static_cast<unsigned>(mod_params.kept_share) << 16) - 1;
    return (half == 0 ? word << 16 : word) <= last;
  }

  template <bool kAligned, int kCount, class Rows, class Visit>
  __device__ __forceinline__ void visit(Rows rows, int key, int column_pair, const Visit& visit_register) const {
    static_assert(kCount % 8 == 0, "columns are whole steps of 16 keys");
    if constexpr (kIndexOffsets == IndexOffsets::kAny) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = key + any_key_offset() + 2 * column_pair + i % 2;
        visit_each_8th<kCount / 4>(first, rows[i / 2], [&](int n, bool stays) { visit_register(4 * n + i, stays); });
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        PhiloxWords x = {};
#pragma unroll
        for (int n = 0; n < kCount / 8; ++n) {  // 16 keys
          const int step = key / 16 + n;
          const bool second = kAligned ? n % 2 == 1 : step % 2 == 1;
          if (n == 0 || !second) x = words_of(step / 2, column_pair, rows[half]);
          const unsigned of_columns[2] = {second ? x.words[2] : x.words[0], second ? x.words[3] : x.words[1]};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            visit_register(8 * n + i / 2 * 4 + 2 * half + i % 2, is_kept(of_columns[i / 2], i % 2));
          }
        }
      }
    }
  }
};
using Dropout = DropoutOf<ModParams>;
