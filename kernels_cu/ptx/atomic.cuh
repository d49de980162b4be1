// Atomic operations with memory ordering.
#pragma once

// Adds to a counter shared by all thread blocks; returns the old value. Stores that this thread has made or observed
// become visible to later additions; stores before earlier additions become visible here.
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* counter, unsigned x) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}
