// Semaphores: they order thread blocks that add up float32 sums in global memory. The first thread block stores its
// part, the others add theirs, and the last one adds the sum to its own part (L36). A counter gives each its rank: the
// low half counts arrivals, the high half additions.
#pragma once
#include "../../ptx/red.cuh"

constexpr unsigned kAdded = 1 << 16;

// Counts the arrival of this thread block, and returns the counter's previous value.
__device__ __forceinline__ unsigned arrive_at(unsigned* counter) { return atom_acquire_add(counter, 1); }

// Returns the rank by arrival.
__device__ __forceinline__ unsigned rank_of(unsigned came) { return came % kAdded; }

// Waits until the thread block of this rank may add: after all lower ranks have added, or after the first one has.
// `value` is the last value read from the counter.
__device__ __forceinline__ void wait_semaphore(const unsigned* counter, unsigned value, unsigned rank, bool after_all) {
  const unsigned expected = after_all ? rank : min(rank, 1);
  while (value / kAdded < expected) value = ld_acquire(counter);
}

__device__ __forceinline__ void signal_added(unsigned* counter) { red_release_add(counter, kAdded); }
