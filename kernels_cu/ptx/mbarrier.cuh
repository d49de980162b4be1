// mbarrier: a barrier in shared memory, passed by address. A phase completes once `count` arrivals and all expected
// bytes have come. A wait names the parity of the phase that must have completed; on a fresh barrier the phase of
// parity 1 has.
#pragma once

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine. A barrier of the thread block must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once for a warp that has read what it waited for. `is_leader` is true in one lane. __syncwarp orders the
// lanes before it, because an arrival does not wait for earlier loads of its warp (L40), and racecheck counts lanes
// (L41).
__device__ __forceinline__ void mbarrier_arrive_warp(unsigned barrier, bool is_leader) {
  __syncwarp();
  if (is_leader) mbarrier_arrive(barrier);
}

// Arrives, and adds to the bytes that the phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Adds to the bytes that the phase expects, without an arrival.
__device__ __forceinline__ void mbarrier_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
