// Backward on Hopper in clusters of two thread blocks, for head dims over 192: dk and dv of 128 keys over the queries
// that see them, and these keys' contribution to dq. (FlashAttention-2, arXiv 2307.08691, algorithm 2.)
//
//   s = k qᵀ, dp = v doutᵀ    wgmma, transposed: rows are the 64 keys of a thread block
//   p = exp2(s c - lse)       ds = p slope (dp - delta), with the slope of common/score.cuh
//   dv += p dout, dk += ds q  wgmma, p from registers, ds from shared memory
//   dq += dsᵀ k               wgmma over the keys of both thread blocks, which exchange ds. Each has half of
//                             the columns: half as much is added in memory. portable/convert.cu rounds the sum.
//
// Roles    warpgroup 0  Warp 0 loads tiles, and warp 1 lse and delta.
//          warpgroup 1  s, p and dv. It passes p slope to warpgroup 2 as floats.
//          warpgroup 2  dp, ds and dk. It copies ds to the other thread block.
//          warpgroup 3  dq, added to the accumulator from registers
//                       Each step is a tile of queries. Warpgroups 1 and 2 issue dv and dk of the step before ahead of
//                       s and dp, so that tiles are released early, and overlap each other's pointwise work.
// Barriers q_full, dout_full     the tile has arrived with lse, or delta; the first one with k, or v
//          q_empty, dout_empty   all warps of warpgroups 1 and 2 have released it
//          ds_full               ds of both thread blocks is in this one's shared memory
//          ds_empty              the warpgroups of dq of both thread blocks have read this one's ds
//          named barriers        storage.cuh
#include "../../ptx/grid.cuh"
#include "loader.cuh"
#include "mainloop.cuh"

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Addresses smem{storage};
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) smem.init();
  cluster_sync();  // the other thread block's barriers exist
  wait_kernels_ahead();
  if (group == 0) {
    setmaxnreg_dec<kLoaderRegisters>();
    if (threadIdx.x < 32) Loader(params, smem).run();
    else if (threadIdx.x < 64) StatsLoader(params, smem).run();
  } else if (group == 1) {
    setmaxnreg_inc<kDvRegisters>();
    DvGroup(params, smem).run();
  } else if (group == 2) {
    setmaxnreg_inc<kDkRegisters>();
    DkGroup(params, smem).run();
  } else {
    setmaxnreg_dec<kDqRegisters>();
    DqGroup(params, smem).run();
  }
  cluster_sync();  // the other thread block accesses nothing here any more
}
