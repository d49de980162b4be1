// Run-time arguments: every kernel takes one struct by value. cuflash/runtime/structs.py mirrors these structs field by
// field: a kernel asserts its struct's size, and a test compares the offset of every field. mod_params.py writes
// ModParams, whose size alone is asserted.
#pragma once
#include "../ptx/tma.cuh"
#include "score.cuh"

// A (batch, seqlen, heads, dim) operand. Strides count elements; the last dimension is contiguous.
struct Operand {
  void* pointer;
  long long stride_batch, stride_seqlen, stride_head;
  int aligned;  // whether every row begins at a multiple of 16 bytes, so that 16-byte accesses are allowed
  int unused;
};

// What every attention kernel knows of its problem. Of variable-length sequences, `batch` is their number, seqlen_q and
// seqlen_k bound their lengths, and the last part says where they lie; the mask and the ranges are not read.
struct ProblemParams {
  int batch, seqlen_q, seqlen_k;
  int heads_q, heads_per_kv;  // heads_per_kv query heads share one kv head
  int head_dim, head_dim_v;
  int mask_lo, mask_hi;    // key j is visible to query i iff i + mask_lo <= j <= i + mask_hi
  int key_begin, key_end;  // the keys that some query sees; all others are read as zeros, whatever they hold
  int row_begin, row_end;  // the queries that see some key
  int padding0;
  ScoreParams score;

  // int32 arrays on the device, or null: common/varlen.cuh says what is then meant.
  const int *cu_seqlens_q, *cu_seqlens_k;   // (batch + 1)
  const int *seqused_q, *seqused_k;         // (batch)
  const int *page_table, *cache_batch_idx;  // (batch, …) and (batch)
  long long page_table_stride;              // from the pages of one sequence to those of the next
  int rows_q, rows_k, batch_k;  // second axis of q; second and first axis of k (with pages, their size and number)
  int mask_first, mask_last, mask_from_end;    // see VarlenSequence
  int zero_unused_rows;                        // whether rows of out that no sequence uses become 0
  int padded_rows_q, padded_rows_k, padding1;  // rows of a head in slot-padded buffers, of all sequences
};

// The functions of a program with mods: cuflash/mods/codegen/cuda.py prints them.
template <bool kOffsetsAreShort>
struct ModFunctions;

// What such a program gets behind its own parameters; nothing in others. cuflash/runtime/mod_params.py
// writes it.
template <bool kEnabled, class Functions>
struct ModParamsOf {};
template <class Functions>
struct ModParamsOf<true, Functions> : Functions::Arrays {
  const void* sinks;              // (heads_q), or null
  const signed char* mask_tiles;  // (batch, heads_q, …, …) of 64 x 64 scores: common/mask_tiles.cuh; or null
  const unsigned* seed;           // of dropout, two words; or null
  long long mask_tiles_batch,
      mask_tiles_head;  // from the mask tiles of one sequence, or head, to those of the next; 0: they share them
  int mask_tiles_row;   // the same of 64 queries
  int sinks_are_wide;   // whether they are float32, whatever q is
  int kept_share;       // of 2^16 weights; what they are multiplied by is its inverse …
  float kept_scale;     // … that is, 2^16 / kept_share
  int unused[2];
};
using ModParams = ModParamsOf<kHasMods, ModFunctions<kShortOffsets>>;

template <class Params>
struct WithMods : Params, ModParams {};

// sm80/forward.cu and sm80/lse.cu.
struct ForwardParams {
  Operand q, k, v, out;
  float* lse;  // (batch, heads_q, seqlen_q), contiguous, or null
  ProblemParams problem;
  int num_q_blocks, num_slices;
};

// sm90/forward/forward.cu and sm90/forward/lse.cu. The maps are of (head_dim, seqlen, heads, batch); those of k and v
// begin at key_begin and end at key_end.
struct TiledForwardParams {
  TensorMap q_map, k_map, v_map, out_map;
  float* lse;         // (batch, heads_q, seqlen_q), contiguous, or null
  unsigned* counter;  // of work tiles taken beyond one a block, zero between launches; null: blocks take them in turn
  ProblemParams problem;
  int num_q_blocks, num_tiles;  // query blocks of a head, and of all heads
  int heads_in_l2;              // query heads whose blocks start longest first: common/tile_scheduler.cuh
  int unused;
};

// The same for variable-length sequences.
struct VarlenForwardParams {
  TensorMap q_map, k_map, v_map, out_map;
  Operand k, v;
  float* lse;
  unsigned* counter;
  ProblemParams problem;
  int heads_in_l2;
  int in_pairs;    // whether two heads of the same rows are scheduled together; the counts of heads are then even
  int tail_parts;  // of the axis of q, whose query blocks start together, longest first: VarlenTileScheduler; 0 for
                   // none
  int page_box;    // keys of a page that the copy engine brings at a time; 0: threads copy each key by itself
  int page_magic;  // unsigned: key / page size is key * page_magic / 2^page_shift, for keys below 2^31
  int page_shift;
};

// sm90/decode/{decode,narrow}.cu. The maps of k and v are those of forward.
struct DecodeParams {
  TensorMap k_map, v_map;
  Operand q, k, v, out;
  float* lse;            // (batch, heads_q, seqlen_q), contiguous, or null
  unsigned* counter;     // as in TiledForwardParams
  unsigned* arrivals;    // splits that have ended, of each query block; zero between launches
  float* partial_out;    // of a split, (max_slots, partial_rows, the tile's head_dim_v) …
  float2* partial_sums;  // … and (max_slots, partial_rows): sum and shift
  ProblemParams problem;
  int heads_kv;
  int page_box, page_magic, page_shift;  // as in VarlenForwardParams
  int max_slots;                         // splits that there is room for
  int partial_rows;                      // of a query block
  int split_tiles;                       // key tiles of a split; 0: as many as keep the GPU busy
  int unused;
};

// sm80/decode.cu.
struct SplitParams {
  Operand q, k, v, out;
  float* lse;            // as in DecodeParams
  unsigned* arrivals;    // splits that have ended, of each block of rows; zero between launches; or null
  float* partial_out;    // (blocks of rows, splits, 16, the tile's head_dim_v) …
  float2* partial_sums;  // … and (blocks of rows, splits, 16): sum and shift; or null
  ProblemParams problem;
  int heads_kv, head_parts;  // head_parts: blocks that share the heads of a group
  int queries;               // of a block of rows
  int splits;                // blocks that share the keys of a query at most
};

// portable/delta.cu.
struct DeltaParams {
  Operand dout, out, dq, dk, dv;  // dk and dv are not used but with num_slots
  const float* lse;               // (batch, heads_q, seqlen_q), contiguous …
  const float* dlse;              // … and the same, or null
  float* stats;                   // two numbers of each query, in rows of stats_rows queries of a head: see stats_step
  float* dq_acc;                  // to be set to zero, unless there are semaphores; or null
  unsigned* semaphores;  // (batch, heads_q, num_q_blocks) counters, then more_semaphores: to be set to zero; or null
  // Of variable-length sequences, to be written; or null.
  void *key_list, *key_shares;  // (max_key_blocks) VisibleBlock, and KeyShares of them
  void *q_blocks, *k_blocks;    // (num_slots) VisibleBlock, one for each slot of kPaddedSlot queries, or keys
  ProblemParams problem;
  int stats_rows;  // seqlen_q rounded up to whole tiles
  // Of query i of a head, lse * log2(e) (for float32 lse; inf where nothing is seen) stands at
  // stats[2 * stats_rows * head + stats_step * i], and delta stats_delta floats further.
  int stats_step, stats_delta;
  int num_q_blocks, more_semaphores;
  int padded_dim;  // columns of a row of dq_acc
  int heads_each;  // of a thread block, one after the other
  int num_slots;   // of keys, whose dk and dv are to be zeroed, or of queries if these are listed, too, and more; or 0
  int block_k, max_key_blocks;  // keys of a key block; key blocks that there is room for
  int sorted_blocks;            // of the list, the last ones
  int takers;                   // thread blocks that take key blocks
  int shared_keys;              // key blocks that may be shared
  int least_parts,
      most_parts;          // thread blocks that share one: wanted, if the sequences have about one length; at most
  int last_steps;          // of a key block if only those are shared that do not fill the GPU, else 0
  int sequences_together;  // that alternate in the list: a power of two, up to 32
};

// sm80/backward.cu: dk, dv and a share of dq.
struct BackwardParams {
  Operand q, k, v, dout, dk, dv;
  const float2* stats;     // (batch, heads_q, stats_rows): as in DeltaParams
  float* dq_acc;           // dq / softmax_scale, in the order of common/accumulators.cuh; or null
  float *dk_acc, *dv_acc;  // dk / softmax_scale and dv of each split, in the same order; or null without splits
  ProblemParams problem;
  int num_k_blocks;
  int splits;       // blocks that share a key block, each with its own query heads of the group
  int heads_in_l2;  // kv heads (with their splits) whose key blocks start longest first: common/tile_scheduler.cuh
  int stats_rows;
};

// sm80/backward_dq.cu: dq alone.
struct BackwardDqParams {
  Operand q, k, v, dout, dq;
  const float2* stats;
  ProblemParams problem;
  int num_q_blocks, num_slices, stats_rows, unused;
};

// sm80/backward_mods.cu: the gradient of a captured array, from one place that loads from it.
struct ModGradientParams {
  Operand q, k, v, dout;
  const float* stats;  // two numbers of each query, as portable/delta.cu writes them
  float* tables;       // sums of each part of the walk (and of each warp where they are looked up); or null …
  void* result;        // … where the sums are the gradient, an array of result_kind
  ProblemParams problem;
  int stats_rows, stats_step, stats_delta;     // as in DeltaParams
  int num_q_tiles, num_k_tiles;                // of the longest sequence
  int by_sequence, by_head, by_query, by_key;  // whether sums stand apart by these; blocks walk over all others
  int num_steps, parts;                        // of the walk, and the blocks that share it
  int adds_atomically;                         // whether all add to one table
  int table_places;                            // of the table of a head, where sums are looked up
  int extents[8], strides[8];                  // of the axes along which they are
  int result_kind;
};

// portable/sinks_gradient.cu.
struct SinksGradientParams {
  const float *lse, *dlse, *stats;  // as in DeltaParams
  float* tables;                    // (parts, heads_q) sums
  ProblemParams problem;
  int stats_rows, stats_step, stats_delta;
  int num_slots, slots_each;  // of kPaddedSlot queries of a head, over all sequences; those of a thread block
  int unused;
};

// portable/sum_tables.cu: the sum of tables becomes an array. An element whose indices along all axes are first … first
// + count - 1 has a place in each table; the others are zero.
struct SumTablesParams {
  const float* tables;
  float* total;                        // of the tables of launches before; or null
  void* result;                        // an array of result_kind, or null where another launch ends the sum
  long long num_elements, table_step;  // of the array; from one table to the next
  long long strides[8];                // of the axes of the array, in a table
  int extents[8], firsts[8], counts[8];
  int rank, num_tables;
  int lanes;  // threads that share an element: 1 or 32
  int adds;   // whether there is a total to add to
  int result_kind, unused;
};

// portable/convert.cu.
struct ConvertParams {
  Operand dq, dk, dv;
  float *dq_acc, *dk_acc, *dv_acc;
  ProblemParams problem;
  int splits, padded_dim, padded_dim_v, unused;  // padded: rounded up to the head dims of the tile
};

// sm90/backward/backward.cu. The maps are of (head_dim, seqlen, heads, batch); those of k and v begin at key_begin and
// end at key_end, those of q and dout at row_begin and row_end.
struct TiledBackwardParams {
  TensorMap q_map, k_map, v_map, dout_map, dq_map, dk_map, dv_map;
  const float* stats;      // (batch, heads_q, 2, stats_rows): lse * log2(e), and delta
  float* dq_acc;           // dq / softmax_scale in the order of the product's fragments
  float *dk_acc, *dv_acc;  // dk / softmax_scale and dv of each of the shared_keys, in the same order; or null
  // (batch, heads_q, num_q_blocks) counters for dq, then shared_keys for dk and dv; if varlen or block-sparse then
  // another, of key blocks that thread blocks have taken.
  unsigned* semaphores;
  const void *key_list, *key_shares;  // varlen, as in DeltaParams
  unsigned* counter;                  // by which thread blocks number themselves as they begin; or null
  ProblemParams problem;
  int num_q_blocks, num_k_blocks;
  int key_blocks;                 // of a head that one block takes, one after the other
  int heads_in_l2;                // kv heads whose key blocks start longest first: common/tile_scheduler.cuh
  int stats_rows, deterministic;  // deterministic: key blocks add to dq in the order of their keys
  // Thread blocks beyond whole_blocks share the last shared_keys key blocks, from shared_first on, counted over batch
  // and kv heads: shared_steps of their query tiles each. Or 2^parts_log2 blocks that follow each other share each key
  // block, and shared_keys are all of them: each has some of the query heads of its group.
  int whole_blocks, shared_first, shared_keys, shared_steps, parts_log2;
  int list_lines, list_stride_batch, list_stride_head, unused;  // as in TileCountsParams
  const int *tile_counts, *key_steps, *key_order;  // of portable/tile_counts.cu, or null unless block-sparse
};

// sm90/backward/backward_dq_dkv.cu, the same for its three gradients.
struct TiledDqDkvParams {
  TensorMap q_map, k_map, v_map, dout_map, dq_map, dk_map, dv_map;
  const float* stats;  // as in TiledBackwardParams
  // Varlen: as in DeltaParams, and the counter of the work that thread blocks have taken.
  const void *q_blocks, *k_blocks;
  unsigned* counter;
  // Where two thread blocks share the query heads of a key block: sums of the one that ends first, and counters, at 0.
  float* acc;
  unsigned* semaphores;
  ProblemParams problem;
  int num_q_blocks, num_k_blocks;
  int heads_in_l2, stats_rows;  // heads_in_l2: query or kv heads whose blocks start longest first
  int first_semaphore;          // of this gradient among the semaphores
};

// portable/block_mask.cu.
struct BlockMaskParams {
  signed char* mask_tiles;  // (batch or 1, heads, mask_tiles_q, mask_tiles_k), contiguous
  ProblemParams problem;
  int num_mask_tiles;  // of all sequences and heads
  int heads;           // query heads, or 1 where they share their mask tiles
  int mask_tiles_q, mask_tiles_k;
  int of_call;  // whether mask tiles that the mask of the problem hides are not asked for
  int unused;
};

// portable/tile_counts.cu.
struct TileCountsParams {
  Operand dq;
  const signed char* mask_tiles;  // as in ModParams
  int* tile_counts;               // (batch, heads_q, num_q_blocks)
  // Of each kv head by itself, of its number in all sequences, or of all of them: the steps of num_k_blocks key blocks,
  // of each of its query heads or of any. A list has room for 32 * list_lines of them.
  int* key_steps;
  // (…, num_k_blocks) of the same kv heads: key blocks, those with more steps first, and their steps. Or null: key
  // blocks are taken in their order.
  int *key_order, *step_counts;
  unsigned* semaphores;  // from first_counter on a zero for each order
  ProblemParams problem;
  long long mask_tiles_batch, mask_tiles_head;
  int mask_tiles_row;
  int num_q_blocks, num_k_blocks, block_q;  // block_q: 64 or 128
  // From what is known of a kv head to that of the same one of the next sequence, and of the next one; 0 where shared.
  int list_stride_batch, list_stride_head;
  int list_lines, first_counter, deterministic;
  int count_blocks;  // of threads, which count tiles; those behind them find steps
};

constexpr int kMaxMergeStates = 248;

// portable/merge.cu: states over disjoint keys, outs (batch, seqlen, heads, head_dim_v), lses (batch, heads, seqlen),
// all contiguous.
struct MergeParams {
  const void* outs[kMaxMergeStates];
  const float* lses[kMaxMergeStates];
  void* out;
  float* lse;
  long long num_elements;  // of one out
  int head_dim_v, heads, seqlen, num_states;
};

// portable/append_kv.cu. k_cache and v_cache are (num_pages, page_size, heads_kv, …): a cache without page_table is one
// page for each sequence. k and v are (batch, rows_k, heads_kv, …), q and q_out (batch, rows_q, heads_q, head_dim),
// with batch 1 where cu_seqlens bound packed rows.
struct AppendParams {
  Operand k_cache, v_cache, k, v, q, q_out;
  const int* seqused_k;                     // (batch)
  const int *page_table, *cache_batch_idx;  // (batch, max_pages) and (batch), or null
  const int *cu_seqlens_k, *cu_seqlens_q;   // (batch + 1), or null
  const void *rotary_cos, *rotary_sin;      // (positions, rotary_dim / 2), or null
  // Elements from row to row.
  long long page_table_stride, rotary_cos_stride, rotary_sin_stride;
  int batch, rows_k, rows_q;             // batch: the number of sequences
  int heads_kv, heads_q;                 // heads_q: 0 without q
  int head_dim_v, head_dim, rotary_dim;  // rotary_dim: 0 where nothing is rotated
  int pieces, pieces_v;                  // of a head of k or q, and of v: what one thread has
  int num_pages, page_size, max_pages;   // max_pages: of one sequence
  int positions;                         // of the tables
  int wide_table;                        // whether rotary_cos and rotary_sin are float32, whatever the rows are
  int interleaved, q_same_position;
  int num_key_blocks;  // thread blocks of keys and values; those of queries follow
};
