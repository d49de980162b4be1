// Run-time arguments, one struct by value. cuflash/params.py packs the same bytes; kParamsBytes ties the two.
#pragma once
#include "../ptx/tma.cuh"
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

// Forward and lse on sm_90. The maps are of (head_dim, seqlen, heads, batch); those of k and v begin at key_begin and
// end at key_end.
struct TiledParams {
  TensorMap q, k, v, out;
  ForwardParams forward;
  unsigned* counter;   // of tiles handed out beyond one a block, zero between launches; null: they are dealt in turn
  int num_tiles;       // query blocks of all heads
  int heads_together;  // query heads whose blocks start longest first, see Schedule
};

// What the kernels of backward share; each reads its part.
struct BackwardParams {
  Operand q, k, v, dout, out;
  Operand dq, dk, dv;
  const float* lse;   // (batch, heads_q, seqlen_q), contiguous …
  const float* dlse;  // … and the same or null
  float2* stats;      // (batch, heads_q, stats_rows): lse * log2(e), inf where nothing is seen, and delta; on sm_90 it
                      // is (batch, heads_q, 2, stats_rows) floats
  float* dq_acc;      // dq / softmax_scale in the order of common/fragments.cuh (on sm_90 of its fragments), or null …
  float* dk_acc;      // … and the same of dk and dv, one for each split of a kv head's query heads (on sm_90 for each of
  float* dv_acc;      // the shared_keys), null without splits
  unsigned* turns;    // (batch, heads_q, num_q_blocks): see sm90/gradient_dq.cuh; then shared_keys of them for dk and dv
  int batch;
  int seqlen_q, seqlen_k;
  int heads_q, heads_per_kv;
  int head_dim, head_dim_v;
  int mask_lo, mask_hi;
  int key_begin, key_end;  // keys that some query sees; all others are read as zeros, whatever they hold …
  int row_begin, row_end;  // … and the queries that see some key
  int num_q_blocks, num_slices;
  int num_k_blocks;
  int splits;                    // blocks that share a key block, each with its own query heads of the group
  int key_blocks;                // of a head that one block takes, one after the other; sm_90
  int heads_together;            // kv heads (with their splits) whose key blocks start by rows, see KeyBlock; sm90: Role
  int stats_rows;                // seqlen_q rounded up to whole tiles
  int padded_dim, padded_dim_v;  // head dims rounded up to those of the tile
  float softmax_scale;
  float scale_log2;     // as in ForwardParams
  float softcap_scale;  // as in ForwardParams
  int aligned;          // bits 0 … 7: q, k, v, dout, out, dq, dk, dv allow 16-byte accesses
  int deterministic;    // sm_90: key blocks add to dq in the order of their keys
  int sm90;             // whether its kernels follow
  // On sm_90 those beyond whole_blocks share the last shared_keys key blocks, from shared_first on, counted over batch and
  // kv heads: shared_steps of their query tiles each.
  int whole_blocks, shared_first, shared_keys, shared_steps;
};

// Backward on sm_90. The maps are of (head_dim, seqlen, heads, batch); those of k and v begin at key_begin and end at
// key_end, those of q and dout at row_begin and row_end.
struct TiledBackwardParams {
  BackwardParams backward;  // first: delta.cu takes it alone
  TensorMap q, k, v, dout, dq, dk, dv;
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
