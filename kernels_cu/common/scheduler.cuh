// Which tile of the problem a block computes. Blocks start in index order: query blocks of one head are neighbours, so
// that its keys and values stay in L2, and the last query block, the longest under a causal mask, comes first.
#pragma once
#include "params.cuh"

struct Tile {
  int row_begin, row_end;  // queries
  int slice;               // which kHeadDimV columns of v and out
  int head, kv_head;
  long long batch;

  template <class Params>
  __device__ explicit Tile(const Params& p) {
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

// As Tile, for blocks that own keys and take the query heads of one kv head, or of one split of them. Within
// heads_together heads the first key blocks of all come first, the longest under a causal mask; so few heads that what
// they share stays in L2.
struct KeyBlock {
  int key_begin, key_end;
  int kv_head, split;
  int batch;
  int head_begin, head_end;  // query heads

  __device__ explicit KeyBlock(const BackwardParams& p) {
    unsigned index = blockIdx.x;
    asm volatile("" : "+r"(index));  // why: as above
    const unsigned heads_kv = p.heads_q / p.heads_per_kv, all = p.batch * heads_kv * p.splits;
    const unsigned together = index / (p.heads_together * p.num_k_blocks) * p.heads_together;
    const unsigned within = index - together * p.num_k_blocks,
                   num_heads = min(unsigned(p.heads_together), all - together);
    const unsigned key_block = within / num_heads, head = together + within - key_block * num_heads;
    const unsigned whole = head / p.splits;
    split = head - whole * p.splits;
    batch = whole / heads_kv;
    kv_head = whole - batch * heads_kv;
    key_begin = key_block * kBlockK;
    key_end = min(key_begin + kBlockK, p.seqlen_k);
    const int num_of_split = (p.heads_per_kv + p.splits - 1) / p.splits;
    head_begin = kv_head * p.heads_per_kv + split * num_of_split;
    head_end = min(head_begin + num_of_split, (kv_head + 1) * p.heads_per_kv);
  }
};
