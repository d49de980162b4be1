// Keys of variable-length sequences in the ring of forward, lse and decode on Hopper: keys of missing pages, and keys
// before the first visible one.
#pragma once
#include "storage.cuh"

// Returns the index, in its sequence, of the page that a key lies in.
template <class Params>
__device__ __forceinline__ int page_of(const Params& params, int key) {
  const unsigned long long product = static_cast<unsigned long long>(key) * static_cast<unsigned>(params.page_magic);
  return static_cast<int>(product >> params.page_shift);
}

// The keys of a tile on missing pages, which no query sees.
struct MissingPages {
  const KernelParams& params;
  const Addresses& smem;
  unsigned slot;  // slot of the ring

  // Sets their scores in the tile to -inf.
  template <int kCount>
  __device__ __forceinline__ void apply(float (&s)[kCount], int column_pair) const {
    if (!kPaged) return;
    unsigned page_bits[4];
    ld_shared_v4(page_bits, smem.page_bits + 16 * slot);
    if ((page_bits[0] & page_bits[1] & page_bits[2] & page_bits[3]) == ~0u) return;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) apply_eight(s + 4 * j, page_bits[j / 4], j % 4, column_pair);
  }

  // As `apply`, for 16 keys of the tile.
  __device__ __forceinline__ void apply_piece(float (&s)[8], int piece, int column_pair) const {
    if (!kPaged) return;
    const unsigned page_bits = ld_shared_u32(smem.page_bits + 16 * slot + 4 * (piece / 2));
#pragma unroll
    for (int j = 0; j < 2; ++j) apply_eight(s + 4 * j, page_bits, piece % 2 * 2 + j, column_pair);
  }

 private:
  // `eighth` is the index of the eight keys within the word's 32.
  __device__ __forceinline__ static void apply_eight(float* s, unsigned page_bits, int eighth, int column_pair) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool is_there = page_bits >> (8 * eighth + 2 * column_pair + e) & 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) s[2 * half + e] = is_there ? s[2 * half + e] : -infinity();
    }
  }
};

// Writes a bit for each key of tile n to a slot of the ring: 1 if the key's page exists. One warp calls.
template <class Params, class AnyWork>
__device__ __forceinline__ void write_page_bits(const Params& params, const Addresses& smem, const AnyWork& work, int n,
                                                unsigned slot, bool lacks_some) {
  const ProblemParams& problem = params.problem;
  const int* const table = problem.page_table + work.number * problem.page_table_stride;
  unsigned words[4] = {~0u, ~0u, ~0u, ~0u};
  if (lacks_some) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = n * kBlockK + 32 * i + threadIdx.x % 32;
      const int page = key < work.visible_end ? table[page_of(params, key)] : 0;
      words[i] = __ballot_sync(0xffffffffu, page >= 0 && page < problem.batch_k);
    }
  }
  if (threadIdx.x % 32 == 0) st_shared_v4(smem.page_bits + 16 * slot, words);
}

// Zeros the keys of tile n of v before the first visible one, so that their contents have no effect. One warp calls.
__device__ __forceinline__ void zero_keys_before(const VarlenQueryWork& work, int n, unsigned tile) {
  const int chunks = const_min(work.visible_begin - n * kBlockK, kBlockK) * 8;  // chunks of 16 bytes in a panel
  for (int panel = 0; panel < kPanelsV; ++panel) {
    for (int i = threadIdx.x % 32; i < chunks; i += 32)
      st_shared_v4(tile + panel * kPanelBytesK + 16 * i, {0, 0, 0, 0});
  }
  fence_proxy_async();
  __syncwarp();
}
