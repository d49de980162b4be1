// Steps of key blocks in Hopper's backward under a mask_mod, and the order of the key blocks. Most steps come first, so
// that the last ones end at about the same time.
#pragma once
#include "../common/mask_tiles.cuh"
#include "../common/query_tiles.cuh"
#include "../common/sequence.cuh"
#include "../ptx/grid.cuh"

constexpr int kKeyBlock = 128;  // keys of a key block

// Writes the list of a key block's steps with a query head, in order, and its end marker. Returns the number of steps.
// All lanes of a warp call together.
template <int kTile>
__device__ __forceinline__ int list_steps(const TileCountsParams& p, const Sequence& sequence, int head, int block,
                                          int* list) {
  struct Context {
    const TileCountsParams& params;
    __device__ __forceinline__ int num_query_tiles() const { return params.num_q_blocks; }
  };
  const Context context{p};
  const QueryTilesOf<kTile, kKeyBlock> tiles(context, sequence.mask(), block);
  const Range keys{block * kKeyBlock, const_min(block * kKeyBlock + kKeyBlock, sequence.seqlen_k())};
  const VisibleTilesOf<AscendingTiles, kKeyBlock, kTile, true, TileCountsParams> visible(
      AscendingTiles(tiles), p, sequence.batch, head, keys, sequence.seqlen_q());
  const int lane = threadIdx.x % 32;
  int count = 0;
#pragma unroll 1
  for (int first = 0; first < tiles.count(); first += 32) {
    const bool exists = first + lane < tiles.count();
    const int tile = exists ? tiles.at(context, first + lane) : tiles.end;
    const MaskTileKinds kinds = visible.look_at(tile);
    const unsigned found = __ballot_sync(0xffffffffu, kinds.any_visible());
    const unsigned before = found & ((1u << lane) - 1);
    if (kinds.any_visible()) list[count + __popc(before)] = VisibleTile(tile, !kinds.any_hidden()).bits;
    count += __popc(found);
  }
  if (lane == 0) list[count] = VisibleTile::end().bits;
  return count;
}

// Writes the order of a kv head's key blocks from their step counts. All threads call it.
__device__ __forceinline__ void write_order(int* order, const int* steps, int blocks) {
  __shared__ int others[kNumThreads];
#pragma unroll 1
  for (int first = 0; first < blocks; first += kNumThreads) {
    const int block = first + threadIdx.x, num_steps = block < blocks ? __ldcg(steps + block) : 0;
    int rank = 0;
#pragma unroll 1
    for (int begin = 0; begin < blocks; begin += kNumThreads) {
      __syncthreads();
      others[threadIdx.x] = begin + int(threadIdx.x) < blocks ? __ldcg(steps + begin + threadIdx.x) : -1;
      __syncthreads();
      const int count = const_min(kNumThreads, blocks - begin);
#pragma unroll 8
      for (int i = 0; i < count; ++i) rank += others[i] > num_steps || (others[i] == num_steps && begin + i < block);
    }
    if (block < blocks) order[rank] = block;
  }
}

// Lists the steps of key blocks of one kv head. `index` counts thread blocks over all such heads. Each warp has a key
// block, and the last thread block of a head to end writes the order.
__device__ __forceinline__ void find_key_steps(const TileCountsParams& p, unsigned index) {
  __shared__ bool is_last;
  const unsigned blocks = (p.num_k_blocks + kNumWarps - 1) / kNumWarps, number = index / blocks;
  const int block = (index - number * blocks) * kNumWarps + threadIdx.x / 32;
  const bool of_batch = p.list_stride_batch > 0, of_head = p.list_stride_head > 0;
  const unsigned heads_kv = p.problem.heads_q / p.problem.heads_per_kv;
  const int batch = !of_batch ? 0 : of_head ? number / heads_kv : number;
  const int kv_head = of_head ? number - batch * heads_kv : 0, heads = of_head ? p.problem.heads_per_kv : 1;
  const long long first = static_cast<long long>(number) * p.num_k_blocks;
  if (block < p.num_k_blocks) {
    const Sequence sequence{p.problem, batch};
    int count = 0;
#pragma unroll 1
    for (int i = 0; i < heads; ++i) {
      const int head = kv_head * p.problem.heads_per_kv + i;
      const unsigned list = (number * heads + i) * p.num_k_blocks + block;
      int* const steps = p.key_steps + 32ull * list * p.list_lines;
      count += p.block_q == 128 ? list_steps<128>(p, sequence, head, block, steps)
                                : list_steps<64>(p, sequence, head, block, steps);
    }
    if (p.key_order != nullptr && threadIdx.x % 32 == 0) p.step_counts[first + block] = count;
  }
  if (p.key_order == nullptr) return;
  wait_kernels_ahead();  // delta.cu zeroes the counter
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(p.semaphores + p.first_counter + number, 1u) == blocks - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  write_order(p.key_order + first, p.step_counts + first, p.num_k_blocks);
}
