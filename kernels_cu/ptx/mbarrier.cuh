// mbarrier: a phase ends once `count` arrivals and all expected bytes are in. A wait names the parity of the phase that
// must have ended; on a fresh barrier parity 1 has. Addresses are of shared memory.
#pragma once

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival for the warp, which has read what it waited for. why in step before: an arrival stands for the accesses
// of one lane, the one that leads.
__device__ __forceinline__ void mbarrier_arrive_warp(unsigned barrier, bool leads) {
  __syncwarp();
  if (leads) mbarrier_arrive(barrier);
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
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
