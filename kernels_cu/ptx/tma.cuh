// TMA: tiles of a tensor in global memory, described by a tensor map, to shared memory by the copy engine. Elements
// outside the tensor arrive as zeros and count as bytes, too.
#pragma once

struct alignas(64) TensorMap {
  unsigned long long words[16];  // opaque: made by cuTensorMapEncodeTiled
};

// Has the copy engine read the map ahead of its first use.
__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One thread; the bytes are counted at the barrier. Coordinates from the innermost dimension on, in elements.
__device__ __forceinline__ void tma_load_4d(unsigned smem_address, const TensorMap* map, unsigned barrier, int c0,
                                            int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(smem_address),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same way back; elements outside the tensor are left out. In bulk groups of this thread.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, unsigned smem_address, int c0, int c1, int c2,
                                             int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem_address), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Between this thread's own accesses to shared memory and the copy engine's or a product's.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Bytes in a row (multiples of 16) to shared memory, counted at the barrier; and back: stored, or added as floats, in
// bulk groups of this thread.
__device__ __forceinline__ void bulk_load(unsigned smem_address, const void* gmem, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address),
      "l"(gmem), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void bulk_store(float* gmem, unsigned smem_address, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem), "r"(smem_address), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_add(float* gmem, unsigned smem_address, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(gmem),
               "r"(smem_address), "r"(bytes)
               : "memory");
}

// Until all but kPending of this thread's groups, the latest, have read what they store …
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// … or have written it.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Between accesses to global memory by the copy engine and by threads.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
