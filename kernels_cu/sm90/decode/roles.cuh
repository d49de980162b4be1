// The roles of the warps of decode on Hopper. `ConsumerType` is the body of the consumer warps.
#pragma once
#include "../../ptx/grid.cuh"
#include "../forward/roles.cuh"
#include "producer.cuh"
#include "scheduler.cuh"

// Zeros all rows of q, of which a work tile may fill only some: weights of the other rows could leave the range
// (forward/softmax.cuh). The consumer warps call.
__device__ __forceinline__ void zero_queries(const Addresses& smem) {
  for (unsigned at = threadIdx.x % 128 * 16; at < kBytesQ; at += 128 * 16) st_shared_v4(smem.q + at, {0, 0, 0, 0});
  fence_proxy_async();
}

template <class ConsumerType>
__device__ __forceinline__ void run_decode(const KernelParams& params) {
  const Addresses smem{shared_storage()};
  const int warp = warp_number();
  launch_next_kernel();
  // One warp waits. The others read nothing that earlier kernels write until all warps have met at kFirstWork.
  if (!kOneTilePerBlock && warp == kSchedulerWarp) wait_kernels_ahead();
  if (warp < 4 && kSetsRegisters) setmaxnreg_dec<kProducerRegisters>();
  if (warp == kSchedulerWarp) return SchedulerWarp<DecodeTileScheduler>{{params, smem}}.run();
  // The other warps share the rest of the start-up, which matters in a short call.
  if (threadIdx.x == 32) smem.init_barriers();
  if (warp == 1) __syncwarp(), bar_arrive(kBarriersMade, 64);
  if (threadIdx.x == 64) tma_prefetch(&params.k_map), tma_prefetch(&params.v_map);
  if (warp == 7) touch(params);
  if (!kWarpsSplitKeys && warp >= 4) zero_queries(smem);
  bar_sync(kFirstWork, kNumThreads);
  if (warp < 4) {
    // The consumer need not wait, as its results depend on these loads.
    if (kOneTilePerBlock) wait_kernels_ahead();
    if (warp == 0) produce_keys<QueryWork>(params, smem, 0);
    else if (warp <= kQueryWarps) QueryProducer<QueryWork>{{params, smem}, warp - 1, kQueryWarps}.run();
    else if (warp == 2 && kPaged) produce_keys<QueryWork>(params, smem, 1);
  } else {
    if (kSetsRegisters) setmaxnreg_inc<kConsumerRegisters>();
    if (kOneTilePerBlock && kHasMods) wait_kernels_ahead();  // they may still write to captured arrays
    ConsumerType({params, smem}, warp - 4).run();
  }
}
