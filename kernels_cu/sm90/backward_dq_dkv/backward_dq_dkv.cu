// Backward on Hopper where dk and dv together do not fit in registers: one kernel each for dq, dk and dv. It computes
// blocks of rows (queries for dq, keys for dk and dv) over the columns that they see. No thread block waits for
// another, and nothing is added up in global memory. Exception: where key blocks of grouped heads are few, two thread
// blocks share each.
//
//              rows     columns  s = a bᵀ       dp = c dᵀ            the gradient, += from registers
//   dq         queries  keys     a = q, b = k   c = dout, d = v      ds b
//   dk         keys     queries  a = k, b = q   c = v, d = dout      ds b
//   dv         keys     queries  a = k, b = q                        p d
//
//   p = exp2(s c - lse)       ds = p (dp - delta) slope, with the slope of common/score.cuh; with mods: mod_step.cuh
//
// Roles    warpgroup 0  Warp 0 loads; if varlen, warp 1 schedules blocks of rows.
//          consumers    Each computes 64 rows with all columns. A step is a tile of columns:
//                       gradient of this tile, s and dp of the next | its p, beside dp | its ds
//                       For dv the s of the next tile is issued first.
// Barriers b_full, d_full    the tile has arrived with lse, or delta; the first one also with a, or c
//          b_empty, d_empty  all consumer warps have released it
//          full, empty       of work_ring.cuh if varlen, of step_ring.cuh if block-sparse
//          requested, rows_left  if varlen: scheduler.cuh
//          kRowsRead         named, of a warpgroup: its warps have read its rows of a
//          kSumsMade         named, of all consumers: for rows that two thread blocks share
//
// If block-sparse (common/mask_tiles.cuh), the loader finds the visible tiles, and pushes them to the consumers
// (step_ring.cuh).
#include "mainloop.cuh"

extern "C" __global__ void __launch_bounds__(kNumThreads, 1) CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char smem_bytes[];
  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Addresses smem{storage};
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) storage.RowWork::SchedulerStorage::init(), smem.init();
  __syncthreads();
  RowWork work(params, storage);
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) work.each(Loader{{params, smem, work}});
    if (warp == 1) work.schedule();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    work.each(Consumer({params, smem, work}, warp - 4));
  }
}
