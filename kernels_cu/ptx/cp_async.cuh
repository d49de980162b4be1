// cp.async: copies from global to shared memory that bypass registers. The form .cg bypasses the L1 cache.
#pragma once

__device__ __forceinline__ void cp_async_16(unsigned smem_address, const void* gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem_address), "l"(gmem) : "memory");
}

// Copies `bytes` bytes (0 to 16) and fills the rest of the 16 with zeros.
__device__ __forceinline__ void cp_async_16_zfill(unsigned smem_address, const void* gmem, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address), "l"(gmem), "r"(bytes) : "memory");
}

// Copies 16 bytes if they exist, else writes zeros. Five instructions shorter than the form with a byte count.
__device__ __forceinline__ void cp_async_16_or_zeros(unsigned smem_address, const void* gmem, bool exists) {
  asm volatile(
      "{\n.reg .pred absent;\nsetp.eq.u32 absent, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, absent;\n}" ::"r"(smem_address),
      "l"(gmem), "r"(static_cast<unsigned>(exists))
      : "memory");
}

// Arrives at `barrier` once this thread's copies have ended. The barrier must count this arrival.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
