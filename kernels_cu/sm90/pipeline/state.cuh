// The pipeline state of a warp: its stage in a ring of kStages slots.
#pragma once
#include "../config.cuh"

// `parity` is that of the phase in which the slot is filled.
struct PipelineState {
  unsigned slot = 0, parity = 0;

  // Returns the state before the advance.
  __device__ __forceinline__ PipelineState advance() {
    const PipelineState left = *this;
    if (++slot == kStages) slot = 0, parity ^= 1;
    return left;
  }
};
