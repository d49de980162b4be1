// Work: which block of rows (queries or keys) of which head a thread block computes. Orders by work assume that thread
// blocks begin about in the order of their index; nothing else depends on it.
#pragma once
#include "range.cuh"

// A block of rows of a head. Heads are counted over the whole batch: head h of batch element b is b * heads + h; where
// a head is divided into parts, its parts are counted in its place.
struct HeadBlock {
  unsigned head, block;
};

// All blocks of a head follow each other, so that what the blocks of a head share stays in the L2 cache.
__device__ constexpr HeadBlock head_by_head(unsigned index, unsigned num_blocks) {
  const unsigned head = index / num_blocks;
  return {head, index - head * num_blocks};
}

// Within heads_in_l2 heads the blocks of equal number start together, block 0 first. Under a causal mask block 0
// should be the longest. The host chooses so few heads that what they share stays in the L2 cache (L34).
__device__ constexpr HeadBlock lpt_order(unsigned index, unsigned num_blocks, unsigned num_heads,
                                         unsigned heads_in_l2) {
  const unsigned of_section = heads_in_l2 * num_blocks, section = index / of_section;
  const unsigned first_head = section * heads_in_l2, within = index - section * of_section;
  const unsigned together = const_min(heads_in_l2, num_heads - first_head);
  const unsigned block = within / together;
  return {first_head + within - block * together, block};
}

// The number of a work tile, of so many, beyond the first ones of all thread blocks. One thread of each block calls,
// until there is no more.
__device__ __forceinline__ unsigned take_number(unsigned* counter, unsigned num_work) {
  const unsigned taken = atomicAdd(counter, 1u);
  // why: the counter must be zero for the next launch. Each work tile beyond the first of a block counts once, and so
  // does the last question of each block, which finds none.
  if (taken == num_work - 1) atomicExch(counter, 0u);
  return taken;
}

struct Work {
  int batch;
  int head;   // a query head where the rows are queries, else a kv head
  int part;   // of the head: a slice of its columns, or a share of its query heads
  int block;  // of rows

  // why of either sign: a signed division of what all lanes have alike stays in uniform registers, which a producer off
  // the critical path needs; an unsigned one has fewer instructions.
  template <class Count>
  __device__ constexpr Work(HeadBlock at, Count heads, Count parts = 1)
      : batch(Count(at.head) / parts / heads),
        head(Count(at.head) / parts - Count(at.head) / parts / heads * heads),
        part(Count(at.head) - Count(at.head) / parts * parts),
        block(at.block) {}
};
