// Clusters: thread blocks that run at the same time on SMs of one GPC, and access each other's shared memory.
#pragma once

// Returns the number of this thread block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Synchronises all threads of the cluster; orders their accesses to shared memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns the address, in the cluster, of the same place in the shared memory of thread block `rank`.
__device__ __forceinline__ unsigned cluster_address(unsigned smem_address, unsigned rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem_address), "r"(rank));
  return address;
}

// Arrives at a barrier of any thread block in the cluster. It orders no accesses to memory by threads: a release at the
// scope of a cluster would wait for all reductions of the thread to global memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

// Starts the copy of contiguous bytes to a thread block's shared memory, where they count at its barrier.
__device__ __forceinline__ void bulk_copy_cluster(unsigned cluster_target, unsigned smem_address, unsigned bytes,
                                                  unsigned cluster_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_target),
               "r"(smem_address), "r"(bytes), "r"(cluster_barrier)
               : "memory");
}
