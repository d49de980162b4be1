// Programmatic dependent launch: a kernel starts before the kernel ahead of it on the stream has ended.
#pragma once

// Waits until the kernels ahead have ended and their writes are visible. Before it a kernel writes nothing that they
// access, and reads again later what it has read (kReadsAhead).
__device__ __forceinline__ void wait_kernels_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel launch early, if it is a dependent launch: it then waits for itself. A no-op before sm_90.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
