// TMA: the copy engine moves tiles between global and shared memory. A tensor map describes the tensor in global
// memory. Elements outside the tensor arrive as zeros, and count as bytes, too.
#pragma once

struct alignas(64) TensorMap {
  unsigned long long words[16];  // opaque; written by cuTensorMapEncodeTiled
};

// Prefetches the map before its first use.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the load of a tile, whose bytes count at the barrier. One thread calls it. Coordinates start at the innermost
// axis.
__device__ __forceinline__ void tma_load_4d(unsigned smem_address, const TensorMap* map, unsigned barrier, int c0,
                                            int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem_address),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Returns the L2 policy that evicts the data first.
__device__ __forceinline__ unsigned long long evict_first_policy() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// kOnce: L2 evicts the tile first.
template <bool kOnce>
__device__ __forceinline__ void tma_load_5d(unsigned smem_address, const TensorMap* map, unsigned barrier, int c0,
                                            int c1, int c2, int c3, int c4) {
  if constexpr (kOnce) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(evict_first_policy())
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];" ::"r"(smem_address),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Starts the store of a tile's elements inside the tensor, in this thread's bulk group, which bulk_commit closes.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, unsigned smem_address, int c0, int c1, int c2,
                                             int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, unsigned smem_address, int c0, int c1, int c2,
                                             int c3, int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Starts the addition of a tile's floats inside the tensor, in this thread's bulk group.
__device__ __forceinline__ void tma_add_4d(const TensorMap* map, unsigned smem_address, int c0, int c1, int c2,
                                           int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_add_5d(const TensorMap* map, unsigned smem_address, int c0, int c1, int c2, int c3,
                                           int c4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
      "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Orders this thread's accesses to shared memory and accesses by the copy engine or wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Starts the load of contiguous bytes, a multiple of 16, which count at the barrier.
__device__ __forceinline__ void bulk_load(unsigned smem_address, const void* gmem, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address),
      "l"(gmem), "r"(bytes), "r"(barrier)
      : "memory");
}

// Starts the store of contiguous bytes, in this thread's bulk group.
__device__ __forceinline__ void bulk_store(float* gmem, unsigned smem_address, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem_address), "r"(bytes)
               : "memory");
}

// Starts the addition of contiguous floats to global memory, in this thread's bulk group.
__device__ __forceinline__ void bulk_add(float* gmem, unsigned smem_address, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
               "r"(smem_address), "r"(bytes)
               : "memory");
}

// Waits until all bulk groups of this thread but the latest kPending have read their source.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all bulk groups of this thread but the latest kPending have written their target.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders accesses to global memory by the copy engine and by threads.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
