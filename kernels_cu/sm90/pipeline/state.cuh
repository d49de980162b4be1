// The pipeline state of a warp: its slot in a ring of kStages slots.
#pragma once
#include "../config.cuh"

// `parity` is the parity of the barrier phase that fills the slot.
struct PipelineState {
  unsigned slot = 0, parity = 0;

  // Advances, and returns the previous state.
  __device__ __forceinline__ PipelineState advance() {
    const PipelineState left = *this;
    if (++slot == kStages) slot = 0, parity ^= 1;
    return left;
  }
};
