// The order in which blocks of threads take the key blocks of backward on Hopper under a mask of the caller's own: parts of
// a head with more steps come first. why: the last ones then end at about the same time.
#pragma once
#include "../common/cells.cuh"
#include "../common/sequence.cuh"

constexpr int kKeyBlock = 128;  // keys of a key block

// The steps of a part of the key blocks of a kv head; where all heads share the cells, with one query head. All lanes of a
// warp call.
template <int kTile>
__device__ __forceinline__ int count_steps(const SeenCountsParams& p, const Sequence& sequence, int kv_head, int part) {
  const int heads = p.cells_head == 0 ? 1 : p.problem.heads_per_kv, first_head = kv_head * p.problem.heads_per_kv;
  const int first = part * p.key_blocks, all = (sequence.seqlen_k() + kKeyBlock - 1) / kKeyBlock;
  const int end = smaller(first + p.key_blocks, all);
  int count = 0;
#pragma unroll 1
  for (int i = first * heads; i < end * heads; ++i) {
    const int block = i / heads, head = first_head + i - block * heads;
    const Range keys{block * kKeyBlock, smaller(block * kKeyBlock + kKeyBlock, sequence.seqlen_k())};
    const TileRange tiles = TileRange::covering(sequence.mask().row_range(keys.begin, keys.end), kTile);
    const SeenTilesOf<true, AscendingTiles, kKeyBlock, kTile, true, SeenCountsParams> seen(
        AscendingTiles(tiles), p, sequence.batch, head, keys, sequence.seqlen_q());
    count += seen.count_seen();
  }
  return count;
}

// Writes the order of parts, from their steps. All threads call.
__device__ __forceinline__ void write_order(int* order, const int* steps, int parts) {
  __shared__ int others[kNumThreads];
#pragma unroll 1
  for (int first = 0; first < parts; first += kNumThreads) {
    const int part = first + threadIdx.x, own = part < parts ? __ldcg(steps + part) : 0;
    int rank = 0;
#pragma unroll 1
    for (int begin = 0; begin < parts; begin += kNumThreads) {
      __syncthreads();
      others[threadIdx.x] = begin + int(threadIdx.x) < parts ? __ldcg(steps + begin + threadIdx.x) : -1;
      __syncthreads();
      const int count = smaller(kNumThreads, parts - begin);
#pragma unroll 8
      for (int i = 0; i < count; ++i) rank += others[i] > own || (others[i] == own && begin + i < part);
    }
    if (part < parts) order[rank] = part;
  }
}

// Finds an order. `index` counts the blocks of threads of all orders. Each of their warps counts the steps of a part, and
// the block that ends last writes the order of all.
__device__ __forceinline__ void find_key_order(const SeenCountsParams& p, unsigned index) {
  __shared__ bool is_last;
  const unsigned blocks = (p.key_parts + kNumWarps - 1) / kNumWarps, number = index / blocks;
  const int part = (index - number * blocks) * kNumWarps + threadIdx.x / 32;
  const unsigned heads_kv = p.problem.heads_q / p.problem.heads_per_kv;
  const int batch = number / heads_kv, kv_head = number - batch * heads_kv;
  int* const steps = p.key_steps + static_cast<long long>(number) * p.key_parts;
  if (part < p.key_parts) {
    const Sequence sequence{p.problem, batch};
    const int count = p.block_q == 128 ? count_steps<128>(p, sequence, kv_head, part)
                                       : count_steps<64>(p, sequence, kv_head, part);
    if (threadIdx.x % 32 == 0) steps[part] = count;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(p.turns + p.first_counter + number, 1u) == blocks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  write_order(p.key_order + static_cast<long long>(number) * p.key_parts, steps, p.key_parts);
}
