// tile_counts: counts, for Hopper's backward under a mask_mod, the key blocks that see each query tile, from mask tiles
// (common/mask_tiles.cuh). Rows of dq that no key block sees become zero. It also lists the steps and the order of key
// blocks.
//
// Roles    A warp owns a query tile of a head. The thread blocks after these list steps (key_steps.cuh).
#include "../ptx/grid.cuh"
#include "key_blocks.cuh"
#include "key_steps.cuh"

using Params = TileCountsParams;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

template <int kTile>
__device__ __forceinline__ int count_key_blocks(const Params& p, const Sequence& sequence, int head, int tile) {
  const Range rows{tile * kTile, const_min(tile * kTile + kTile, sequence.seqlen_q())};
  const TileRange keys = TileRange::covering(sequence.mask().key_range(rows.begin, rows.end), kKeyBlock);
  const VisibleTilesOf<AscendingTiles, kTile, kKeyBlock, false, Params> visible(AscendingTiles(keys), p, sequence.batch,
                                                                                head, rows, sequence.seqlen_k());
  return visible.count_visible();
}

// Counts the key blocks of a tile, and zeroes its rows of dq if there are none.
__device__ __forceinline__ void count_of_tile(const Params& p, unsigned index) {
  constexpr int kLanes = 8;  // threads that zero a row
  const ProblemParams& problem = p.problem;
  const unsigned of_head = index / unsigned(p.num_q_blocks);
  if (of_head >= unsigned(problem.batch) * unsigned(problem.heads_q)) return;
  const int tile = index - of_head * p.num_q_blocks, batch = of_head / unsigned(problem.heads_q);
  const int head = of_head - batch * problem.heads_q;
  const Sequence sequence{problem, batch};
  const int count =
      p.block_q == 128 ? count_key_blocks<128>(p, sequence, head, tile) : count_key_blocks<64>(p, sequence, head, tile);
  if (threadIdx.x % 32 == 0) p.tile_counts[index] = count;
  if (count > 0 || kAccumulates) return;
  const int end = const_min((tile + 1) * p.block_q, sequence.seqlen_q());
#pragma unroll 1
  for (int row = tile * p.block_q + threadIdx.x % 32 / kLanes; row < end; row += 32 / kLanes) {
    zero_row<kLanes>(p.dq, sequence.queries(), head, row, problem.head_dim);
  }
}

// Launched while delta.cu, the kernel ahead, still runs. delta.cu began after all earlier kernels had ended, so only
// the counters must be waited for.
extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ Params p) {
  launch_next_kernel();
  if (blockIdx.x < p.count_blocks) count_of_tile(p, blockIdx.x * kNumWarps + threadIdx.x / 32);
  else find_key_steps(p, blockIdx.x - p.count_blocks);
  wait_kernels_ahead();  // the next kernel waits only for this one
}
