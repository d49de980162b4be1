// Run-time arguments, one struct by value. cuflash/params.py packs the same bytes; kParamsBytes ties the two.
#pragma once
#include "config.cuh"

// A (batch, seqlen, heads, dim) operand; strides count elements, the last dimension is contiguous.
struct Operand {
  void* pointer;
  long long stride_batch;
  long long stride_seqlen;
  long long stride_head;
};

struct ForwardParams {
  Operand q, k, v, out;
  float* lse;  // (batch, heads_q, seqlen_q), contiguous, or null
  int seqlen_q, seqlen_k;
  int heads_q, heads_per_kv;
  int head_dim, head_dim_v;
  int mask_lo, mask_hi;    // key j is visible to query i iff i + lo <= j <= i + hi
  int key_begin, key_end;  // keys that some query sees; all others are read as zeros, whatever they hold
  int num_q_blocks, num_slices;
  float scale_log2;     // exponent = score * scale_log2: (softmax_scale or softcap) * log2(e)
  float softcap_scale;  // softmax_scale / softcap, or 0 without softcap
  int aligned;          // bit 0, 1, 2, 3: q, k, v, out allow 16-byte accesses
  int unused;
};

constexpr int kMaxMergeStates = 248;

// States over disjoint keys: outs (batch, seqlen, heads, head_dim_v), lses (batch, heads, seqlen), all contiguous.
struct MergeParams {
  const void* outs[kMaxMergeStates];
  const float* lses[kMaxMergeStates];
  void* out;
  float* lse;
  long long num_elements;  // of one out
  int head_dim_v, heads, seqlen, num_states;
  int vector;  // 16-byte accesses are allowed: every row of every state starts at a multiple of 16 bytes
  int unused;
};
