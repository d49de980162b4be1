// Semaphores: how thread blocks add up, in float32 in global memory, what each of them has a share of. The first block
// stores its share, the others add theirs, and the last block adds what is there to its own (L36). A counter says
// which block is which. Its low half counts the blocks that have come, its high half those that have added.
#pragma once
#include "../../ptx/red.cuh"

constexpr unsigned kAdded = 1 << 16;

// Counts this block as one that has come. The result is the counter as it was before.
__device__ __forceinline__ unsigned arrive_at(unsigned* counter) { return atom_acquire_add(counter, 1); }

// The place in the order of coming.
__device__ __forceinline__ unsigned rank_of(unsigned came) { return came % kAdded; }

// Waits until the block of this rank may add: after all blocks before it have added, or after the first one has.
// `value` is the counter when it was last read.
__device__ __forceinline__ void wait_semaphore(const unsigned* counter, unsigned value, unsigned rank, bool after_all) {
  const unsigned expected = after_all ? rank : min(rank, 1);
  while (value / kAdded < expected) value = ld_acquire(counter);
}

__device__ __forceinline__ void signal_added(unsigned* counter) { red_release_add(counter, kAdded); }
