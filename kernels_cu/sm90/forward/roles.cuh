// The roles of the warps of forward and lse on Hopper, in dense and in varlen kernels. `ConsumerType` is the body of
// the consumer warps.
#pragma once
#include "../../ptx/warpgroup.cuh"
#include "producer.cuh"

// Returns the warp's index. The shuffle shows the compiler that all lanes have the same value.
__device__ __forceinline__ int warp_number() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// Reads a word of every 64 bytes of the parameters. Each line comes from memory once a launch, and the scheduler warp
// would wait for one after the other.
__device__ __forceinline__ void touch(const KernelParams& params) {
  const int* const words = reinterpret_cast<const int*>(&params);
#pragma unroll
  for (unsigned at = 0; at < sizeof(KernelParams) / 4; at += 16) asm volatile("" ::"r"(words[at]));
}

// Prefetches lengths to L2: the scheduler warp reads lengths of keys only after lengths of queries.
__device__ __forceinline__ void fetch_lengths(const ProblemParams& p) {
  const int at = threadIdx.x % 32 * 32;
  auto fetch = [&](const int* lengths) {
    if (lengths != nullptr && at < p.batch) asm volatile("prefetch.global.L2 [%0];" ::"l"(lengths + at));
  };
  fetch(p.cu_seqlens_k), fetch(p.seqused_q), fetch(p.seqused_k);
}

template <class ConsumerType>
__device__ __forceinline__ void run_dense(const KernelParams& params) {
  const Addresses smem{shared_storage()};
  const int warp = warp_number();
  // Four warps share the start-up, since copies begin only after it.
  QueryWork first;
  // Computed by the scheduler warp alone: values common to all warps use uniform registers, which are slower (L53).
  if (warp == kSchedulerWarp) first = TileScheduler().work(params);
  if (threadIdx.x == 32) smem.init_barriers();
  if (threadIdx.x == 64) tma_prefetch(&params.k_map), tma_prefetch(&params.q_map);
  if (threadIdx.x == 96 && kHeadDimV > 0) tma_prefetch(&params.v_map), tma_prefetch(&params.out_map);
  __syncthreads();
  if (warp < 4) {
    setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) DenseKeyProducer<QueryWork>{{{params, smem}}}.run(first);
    else if (warp <= kQueryWarps) QueryProducer<QueryWork>{{params, smem}, warp - 1, kQueryWarps}.run();
    else if (kBlockSparse && warp == kSchedulerWarp) DenseSchedulerWarp<QueryWork>{{{params, smem}}}.run(first);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    ConsumerType({params, smem}, warp - 4).run();
  }
}

template <class ConsumerType>
__device__ __forceinline__ void run_varlen(const KernelParams& params) {
  const Addresses smem{shared_storage()};
  const int warp = warp_number();
  // The scheduler computes the first work tile while other warps share the rest of the start-up.
  if (warp < 4) setmaxnreg_dec<kProducerRegisters>();
  if (warp == kSchedulerWarp) return SchedulerWarp<TileScheduler>{{params, smem}}.run();
  if (threadIdx.x == 32) smem.init_barriers();
  if (warp == 1) __syncwarp(), bar_arrive(kBarriersMade, 64);
  if (threadIdx.x == 64) tma_prefetch(&params.k_map), tma_prefetch(&params.q_map);
  if (threadIdx.x == 64 && kHeadDimV > 0) tma_prefetch(&params.v_map), tma_prefetch(&params.out_map);
  if (warp == 7) touch(params);
  if (warp == 6) fetch_lengths(params.problem);
  bar_sync(kFirstWork, kNumThreads);
  if (warp < 4) {
    if (warp == 0) produce_keys<QueryWork>(params, smem, 0);
    else if (warp <= kQueryWarps) QueryProducer<QueryWork>{{params, smem}, warp - 1, kQueryWarps}.run();
    else if (warp == 2 && kPaged && kPanelsV > 0) produce_keys<QueryWork>(params, smem, 1);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    ConsumerType({params, smem}, warp - 4).run();
  }
}

template <class ConsumerType>
__device__ __forceinline__ void run_roles(const KernelParams& params) {
  if constexpr (kVarlen) run_varlen<ConsumerType>(params);
  else run_dense<ConsumerType>(params);
}
