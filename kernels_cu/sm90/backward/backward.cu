// Backward on Hopper: dk and dv of key blocks over the queries that see them, and these keys' contribution to dq.
// (FlashAttention-2, arXiv 2307.08691, algorithm 2.)
//
//   s = k qᵀ, dp = v doutᵀ    wgmma, transposed: rows are keys, so that p and ds are left operands in registers
//   p = exp2(s c - lse)       ds = p (dp - delta) slope, with the slope of common/score.cuh; with mods: mod_step.cuh
//   dv += p dout, dk += ds q  wgmma, p and ds from registers (with kDqByQueries ds of dk from shared memory)
//   dq += dsᵀ k               wgmma, ds through shared memory; summed over key blocks by dq_accumulate.cuh
//
// Roles    warpgroup 0  Warp 0 loads. Warp 1 waits for semaphores of dq tiles; warps 2 and 3 move these tiles out.
//          consumers    Each computes 64 keys of the block with all queries. A step is a tile of queries:
//                       s, dp | p, ds | dv | (both have written ds) | dq | dk, and dq to shared memory beside it
// Barriers q_full, dout_full     the tile has arrived with lse, or delta; the first of a key block also with k, or v
//          q_empty, dout_empty   all consumer warps have released it
//          kv_empty              all consumer warps have released the shared memory of k and v
//          semaphore_full/_empty a step's dq may leave, its mode is there; its tile is handed to the copy engine
//          dq_empty              the copy engine has read the tile of dq from shared memory
//          sum_full, sum_empty   the sum of the other key blocks is in shared memory; all consumers have read it
//          full, empty           of work_ring.cuh if varlen, of step_ring.cuh if block-sparse
//          named barriers        storage.cuh
//
// If block-sparse (common/mask_tiles.cuh), warp 0 takes key blocks with their visible steps, and pushes them to all
// other warps (step_ring.cuh). Only the key blocks that see some of a tile's queries then add to its dq.
#include "../../ptx/grid.cuh"
#include "loader.cuh"
#include "mainloop.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Addresses smem{storage};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 32) storage.KeyWork::SchedulerStorage::take_number(params);
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  wait_kernels_ahead();
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) Loader(params, smem).run();
    else if (warp == 1) SemaphoreWarp(params, smem).run();
    else DqWarp(params, smem, warp - 2).run();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    Consumer(params, smem, warp - 4).run();
  }
}
