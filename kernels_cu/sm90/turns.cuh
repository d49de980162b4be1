// How blocks add up what each has a share of, in float32, in global memory: the first stores its share, so that nothing
// need be zeroed before, others add theirs, and the last adds to its own what is there. A counter tells who is which:
// how many blocks have come (low half), and how many have added (high half).
#pragma once
#include "../ptx/red.cuh"

constexpr unsigned kAdded = 1 << 16;

// `counter` as it was when this block came.
__device__ __forceinline__ unsigned come_to(unsigned* counter) { return atom_acquire_add(counter, 1); }

__device__ __forceinline__ unsigned rank_of(unsigned came) { return came % kAdded; }

// Until the block of a rank may: after all before it, or after the first alone. `seen`: the counter when last read.
__device__ __forceinline__ void await_turn(const unsigned* counter, unsigned seen, unsigned rank, bool after_all) {
  const unsigned wanted = after_all ? rank : min(rank, 1);
  while (seen / kAdded < wanted) seen = ld_acquire(counter);
}

__device__ __forceinline__ void tell_added(unsigned* counter) { red_release_add(counter, kAdded); }
