// Which tile of the problem a block computes. Blocks start in index order: query blocks of one head are neighbours, so
// that its keys and values stay in L2, and the last query block, the longest under a causal mask, comes first.
#pragma once
#include "params.cuh"

struct Tile {
  int row_begin, row_end;  // queries
  int slice;               // which kHeadDimV columns of v and out
  int head, kv_head;
  long long batch;

  __device__ explicit Tile(const ForwardParams& p) {
    // why: opaque to the compiler, so that the epilogue works its tile out again instead of holding it in registers.
    unsigned index = blockIdx.x;
    asm volatile("" : "+r"(index));
    const unsigned outer = index / p.num_q_blocks;
    const int q_block = p.num_q_blocks - 1 - static_cast<int>(index - outer * p.num_q_blocks);
    const unsigned heads = outer / p.num_slices;
    slice = outer - heads * p.num_slices;
    batch = heads / p.heads_q;
    head = heads - static_cast<unsigned>(batch) * p.heads_q;
    kv_head = head / p.heads_per_kv;
    row_begin = q_block * kBlockQ;
    row_end = min(row_begin + kBlockQ, p.seqlen_q);
  }
};
