// Atomic operations with an order.
#pragma once

// Adds to a counter that all thread blocks share; the result is what it was. What this thread and others have stored
// that it knows of is seen by whoever counts later, and what those stored who counted before is seen from now on.
__device__ __forceinline__ unsigned atomic_add_acq_rel(unsigned* counter, unsigned x) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}
