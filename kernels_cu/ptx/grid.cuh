// Kernels that are launched before the kernel ahead of them on the stream has ended.
#pragma once

// Waits until the kernels ahead have ended, and what they wrote can be read. Before, nothing of that is written, and
// what is read (kReadsAhead) is read again.
__device__ __forceinline__ void wait_kernels_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel be launched, if it is one of these: it waits by itself. On older GPUs there are none.
__device__ __forceinline__ void launch_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
