// Work tiles: the block of rows (queries or keys) of a head that a thread block computes. Orders by work assume that
// thread blocks start about in index order; correctness does not depend on it.
#pragma once
#include "range.cuh"

// A block of rows of a head. Heads are counted over the whole batch: head h of batch element b is b * heads + h. If a
// head is divided into parts, `head` counts parts.
struct HeadBlock {
  unsigned head, block;
};

// Orders all blocks of a head consecutively, so that their shared operands stay in the L2 cache.
__device__ constexpr HeadBlock head_by_head(unsigned index, unsigned num_blocks) {
  const unsigned head = index / num_blocks;
  return {head, index - head * num_blocks};
}

// Orders blocks by longest processing time first (LPT): within heads_in_l2 heads, blocks of equal index start together,
// block 0 first. Under a causal mask block 0 should be the longest. The host chooses so few heads that their shared
// operands stay in the L2 cache (L34).
__device__ constexpr HeadBlock lpt_order(unsigned index, unsigned num_blocks, unsigned num_heads,
                                         unsigned heads_in_l2) {
  const unsigned of_section = heads_in_l2 * num_blocks, section = index / of_section;
  const unsigned first_head = section * heads_in_l2, within = index - section * of_section;
  const unsigned together = const_min(heads_in_l2, num_heads - first_head);
  const unsigned block = within / together;
  return {first_head + within - block * together, block};
}

// Claims a work tile beyond the first one of each thread block; returns its index among those. One thread of each block
// calls it until the result is past the end.
__device__ __forceinline__ unsigned take_number(unsigned* counter, unsigned num_work) {
  const unsigned taken = atomicAdd(counter, 1u);
  // Resets the counter for the next launch. Each work tile beyond a block's first counts once, and so does the last,
  // failing claim of each block: num_work in all.
  if (taken == num_work - 1) atomicExch(counter, 0u);
  return taken;
}

struct Work {
  int batch;
  int head;   // a query head if rows are queries, else a kv head
  int part;   // index within the head: a slice of its columns, or a split of its query heads
  int block;  // block of rows

  // `Count` is signed or unsigned: a signed division of warp-uniform values stays in uniform registers, which a
  // producer off the critical path needs. An unsigned one has fewer instructions.
  template <class Count>
  __device__ constexpr Work(HeadBlock at, Count heads, Count parts = 1)
      : batch(Count(at.head) / parts / heads),
        head(Count(at.head) / parts - Count(at.head) / parts / heads * heads),
        part(Count(at.head) - Count(at.head) / parts * parts),
        block(at.block) {}
};
