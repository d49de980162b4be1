// Kernel parameters: each kernel takes one struct by value. cuflash/runtime/structs.py mirrors these structs field by
// field. A kernel asserts the size of its struct, and a test compares all offsets. mod_params.py writes ModParams, of
// which only the size is asserted.
#pragma once
#include "../ptx/tma.cuh"
#include "score.cuh"

// A (batch, seqlen, heads, dim) operand. Strides count elements; the last dimension is contiguous.
struct Operand {
  void* pointer;
  long long stride_batch, stride_seqlen, stride_head;
  int aligned;  // 1 if every row begins at a multiple of 16 bytes, so that 16-byte accesses are allowed
  int unused;
};

// Parameters that all attention kernels share. If varlen, `batch` is the number of sequences, seqlen_q and seqlen_k
// bound their lengths, and the second half locates them; mask_lo … row_end are not read.
struct ProblemParams {
  int batch, seqlen_q, seqlen_k;
  int heads_q, heads_per_kv;  // heads_per_kv query heads share one kv head
  int head_dim, head_dim_v;
  int mask_lo, mask_hi;    // query i sees key j if and only if i + mask_lo <= j <= i + mask_hi
  int key_begin, key_end;  // keys that some query sees; all others are read as zeros, whatever memory holds
  int row_begin, row_end;  // queries that see some key
  int padding0;
  ScoreParams score;

  // int32 arrays on the device, or null: see common/varlen.cuh.
  const int *cu_seqlens_q, *cu_seqlens_k;   // (batch + 1)
  const int *seqused_q, *seqused_k;         // (batch)
  const int *page_table, *cache_batch_idx;  // (batch, max_pages) and (batch)
  long long page_table_stride;              // elements from one sequence's pages to the next one's
  int rows_q, rows_k, batch_k;  // second axis of q; second and first axis of k (if paged: page size and page count)
  int mask_first, mask_last, mask_from_end;    // see VarlenSequence
  int zero_unused_rows;                        // rows of out without a sequence are set to 0
  int padded_rows_q, padded_rows_k, padding1;  // rows of a head in slot-padded buffers, over all sequences
};

// The printed functions of a program with mods (cuflash/mods/codegen/cuda.py).
template <bool kOffsetsAreShort>
struct ModFunctions;

// The parameters of mods, which follow the kernel's own parameters; empty without mods. cuflash/runtime/mod_params.py
// writes them.
template <bool kEnabled, class Functions>
struct ModParamsOf {};
template <class Functions>
struct ModParamsOf<true, Functions> : Functions::Arrays {
  const void* sinks;              // (heads_q), or null
  const signed char* mask_tiles;  // (batch, heads_q, …, …) of 64 x 64 scores (common/mask_tiles.cuh), or null
  const unsigned* seed;           // of dropout, two words, or null
  long long mask_tiles_batch,
      mask_tiles_head;  // strides of mask tiles over sequences and heads; 0 if they are shared
  int mask_tiles_row;   // stride of mask tiles over 64 queries
  int sinks_are_wide;   // 1 if sinks are float32, whatever the dtype of q
  int kept_share;       // kept weights out of 2^16 …
  float kept_scale;     // … and their factor, 2^16 / kept_share
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

// sm90/forward/forward.cu and sm90/forward/lse.cu. Tensor maps are (head_dim, seqlen, heads, batch); the maps of k and
// v begin at key_begin and end at key_end.
struct TiledForwardParams {
  TensorMap q_map, k_map, v_map, out_map;
  float* lse;         // (batch, heads_q, seqlen_q), contiguous, or null
  unsigned* counter;  // work tiles claimed beyond each block's first; zero between launches; null: static order
  ProblemParams problem;
  int num_q_blocks, num_tiles;  // query blocks of a head, and of all heads
  int heads_in_l2;              // query heads whose blocks start longest first: lpt_order
  int unused;
};

// sm90/forward/forward.cu with kAccumulates, which reads and writes rows of out in global memory.
struct TiledForwardStateParams : TiledForwardParams {
  Operand out;
  long long unused_of_state[3];
};

// sm90/forward/forward.cu and sm90/forward/lse.cu for variable-length sequences.
struct VarlenForwardParams {
  TensorMap q_map, k_map, v_map, out_map;
  Operand k, v;
  float* lse;
  unsigned* counter;
  ProblemParams problem;
  int heads_in_l2;
  int in_pairs;    // 1 if two heads of the same rows are scheduled together; the counts of heads are then even
  int tail_parts;  // last parts of the q axis, whose query blocks start longest first; 0: none
  int page_box;    // keys of a page per TMA copy; 0: threads copy each key
  int page_magic;  // unsigned: key / page size is key * page_magic / 2^page_shift, for keys below 2^31
  int page_shift;
};

struct VarlenForwardStateParams : VarlenForwardParams {  // as TiledForwardStateParams
  Operand out;
  long long unused_of_state[3];
};

// sm90/decode/{decode,narrow}.cu. The maps of k and v are those that forward takes.
struct DecodeParams {
  TensorMap k_map, v_map;
  Operand q, k, v, out;
  float* lse;            // (batch, heads_q, seqlen_q), contiguous, or null
  unsigned* counter;     // as in TiledForwardParams
  unsigned* arrivals;    // finished splits of each query block; zero between launches
  float* partial_out;    // o of the splits: (max_slots, partial_rows, the tile's head_dim_v) …
  float2* partial_sums;  // … and their row sums and shifts: (max_slots, partial_rows)
  ProblemParams problem;
  int heads_kv;
  int page_box, page_magic, page_shift;  // as in VarlenForwardParams
  int max_slots;                         // splits that the partial buffers hold
  int partial_rows;                      // rows of a query block
  int split_tiles;                       // key tiles of a split; 0: as many as keep the GPU busy
  int unused;
};

// sm80/decode.cu.
struct SplitParams {
  Operand q, k, v, out;
  float* lse;            // as in DecodeParams
  unsigned* arrivals;    // finished splits of each block of rows; zero between launches; or null
  float* partial_out;    // o of the splits: (blocks of rows, splits, 16, the tile's head_dim_v) …
  float2* partial_sums;  // … and row sums and shifts: (blocks of rows, splits, 16); or null
  ProblemParams problem;
  int heads_kv, head_parts;  // head_parts: thread blocks that share the query heads of a group
  int queries;               // queries of a block of rows
  int splits;                // most thread blocks that share the keys of a query
};

// portable/delta.cu.
struct DeltaParams {
  Operand dout, out, dq, dk, dv;  // dk and dv are used only if num_slots > 0
  const float* lse;               // (batch, heads_q, seqlen_q), contiguous …
  const float* dlse;              // … and so is dlse, or null
  float* stats;                   // two numbers per query, in rows of stats_rows queries of a head: see stats_step
  float* dq_acc;                  // set to zero, unless there are semaphores; or null
  unsigned* semaphores;           // (batch, heads_q, num_q_blocks) counters, then more_semaphores; set to zero; or null
  // Outputs for variable-length sequences, or null.
  void *key_list, *key_shares;  // (max_key_blocks) VisibleBlock, and their KeyShares
  void *q_blocks, *k_blocks;    // (num_slots) VisibleBlock, one per slot of kPaddedSlot queries or keys
  ProblemParams problem;
  int stats_rows;  // seqlen_q rounded up to whole tiles
  // Query i of a head has lse * log2(e) at stats[2 * stats_rows * head + stats_step * i], and delta stats_delta floats
  // further. float32 stores lse itself. A query without visible keys stores inf.
  int stats_step, stats_delta;
  int num_q_blocks, more_semaphores;
  int padded_dim;               // columns of a row of dq_acc
  int heads_each;               // heads of a thread block, one after the other
  int num_slots;                // slots of keys, whose hidden dk and dv become zero, and of listed queries; or 0
  int block_k, max_key_blocks;  // keys of a key block; capacity of key_list in key blocks
  int sorted_blocks;            // key blocks at the end of the list that are sorted
  int takers;                   // thread blocks that take key blocks
  int shared_keys;              // most key blocks that may be shared
  int least_parts,
      most_parts;          // thread blocks per key block: wanted for sequences of about one length, and most
  int last_steps;          // steps of a key block if only the last, partial wave is shared; else 0
  int sequences_together;  // sequences that alternate in the list: a power of two, up to 32
};

// portable/delta.cu with a delta of the caller: read, or written.
struct DeltaArrayParams : DeltaParams {
  float* delta;  // (batch, heads_q, seqlen_q), contiguous
};

// sm80/backward.cu: dk, dv and the sums of dq.
struct BackwardParams {
  Operand q, k, v, dout, dk, dv;
  const float2* stats;     // (batch, heads_q, stats_rows): as in DeltaParams
  float* dq_acc;           // dq / softmax_scale, in the order of common/accumulators.cuh; or null
  float *dk_acc, *dv_acc;  // dk / softmax_scale and dv of each split, in the same order; or null without splits
  ProblemParams problem;
  int num_k_blocks;
  int splits;       // thread blocks that share a key block, each with some query heads of the group
  int heads_in_l2;  // kv heads (with their splits) whose key blocks start longest first: lpt_order
  int stats_rows;
};

// sm80/backward_dq.cu: dq alone.
struct BackwardDqParams {
  Operand q, k, v, dout, dq;
  const float2* stats;
  ProblemParams problem;
  int num_q_blocks, num_slices, stats_rows, unused;
};

// sm80/backward_mods.cu: one term of the gradient of a captured array, for one load of the score's expression.
struct ModGradientParams {
  Operand q, k, v, dout;
  const float* stats;  // two numbers per query, as portable/delta.cu writes them
  float* tables;       // sums of each part of the walk (and of each warp, if gathered); or null …
  void* result;        // … if the sums are the gradient itself, an array of result_kind
  ProblemParams problem;
  int stats_rows, stats_step, stats_delta;     // as in DeltaParams
  int num_q_tiles, num_k_tiles;                // tiles of the longest sequence
  int by_sequence, by_head, by_query, by_key;  // axes over which sums are separate; blocks walk over all other axes
  int num_steps, parts;                        // steps of the walk, and thread blocks that share it
  int adds_atomically;                         // 1 if all warps add to one table
  int table_places;                            // entries in the table of a head, if sums are gathered
  int extents[8], strides[8];                  // extents and table strides of the gathered axes
  int result_kind;
};

// portable/sinks_gradient.cu.
struct SinksGradientParams {
  const float *lse, *dlse, *stats;  // as in DeltaParams
  float* tables;                    // (parts, heads_q) sums
  ProblemParams problem;
  int stats_rows, stats_step, stats_delta;
  int num_slots, slots_each;  // slots of kPaddedSlot queries over all sequences; slots of a thread block
  int unused;
};

// portable/sum_tables.cu: adds tables into an array. Each table has an entry for the elements whose index along every
// axis lies in first … first + count - 1; all other elements are zero.
struct SumTablesParams {
  const float* tables;
  float* total;                        // sums of earlier launches, or null
  void* result;                        // an array of result_kind, or null if a later launch ends the sum
  long long num_elements, table_step;  // elements of the array; distance between tables
  long long strides[8];                // strides in a table of the array's axes
  int extents[8], firsts[8], counts[8];
  int rank, num_tables;
  int lanes;  // threads per element: 1 or 32
  int adds;   // 1 if `total` is added
  int result_kind, unused;
};

// portable/convert.cu.
struct ConvertParams {
  Operand dq, dk, dv;
  float *dq_acc, *dk_acc, *dv_acc;
  ProblemParams problem;
  int splits, padded_dim, padded_dim_v, unused;  // padded: rounded up to the head dims of the tile
};

// sm90/backward/backward.cu. Tensor maps are (head_dim, seqlen, heads, batch). The maps of k and v begin at key_begin
// and end at key_end; the maps of q and dout, at row_begin and row_end.
struct TiledBackwardParams {
  TensorMap q_map, k_map, v_map, dout_map, dq_map, dk_map, dv_map;
  const float* stats;      // (batch, heads_q, 2, stats_rows): lse * log2(e), and delta
  float* dq_acc;           // dq / softmax_scale in the order of the product's fragments; null with kAccumulates
  float *dk_acc, *dv_acc;  // dk / softmax_scale and dv of each of the shared_keys, in the same order; or null
  // (batch, heads_q, num_q_blocks) counters for dq, then shared_keys for dk and dv. If varlen or block-sparse, one more
  // counts the key blocks that thread blocks have taken.
  unsigned* semaphores;
  const void *key_list, *key_shares;  // varlen, as in DeltaParams
  unsigned* counter;                  // gives thread blocks their numbers in order of start; or null
  ProblemParams problem;
  int num_q_blocks, num_k_blocks;
  int key_blocks;                 // consecutive key blocks of a head per thread block
  int heads_in_l2;                // kv heads whose key blocks start longest first: lpt_order
  int stats_rows, deterministic;  // deterministic: key blocks add to dq in the order of their keys
  // Thread blocks from whole_blocks on share the last shared_keys key blocks, from shared_first on, counted over batch
  // and kv heads: shared_steps of their query tiles each. Or, if parts_log2 > 0, all key blocks are shared:
  // 2^parts_log2 consecutive thread blocks split the query heads of the group.
  int whole_blocks, shared_first, shared_keys, shared_steps, parts_log2;
  int list_lines, list_stride_batch, list_stride_head, unused;  // as in TileCountsParams
  const int *tile_counts, *key_steps, *key_order;               // of portable/tile_counts.cu; null unless block-sparse
};

// sm90/backward/backward.cu with kAccumulates, which adds dk and dv from registers.
struct TiledBackwardSumsParams : TiledBackwardParams {
  Operand dk, dv;
  long long unused_of_sums[6];
};

// sm90/backward_dq_dkv/backward_dq_dkv.cu, for each of its three gradients.
struct TiledDqDkvParams {
  TensorMap q_map, k_map, v_map, dout_map, dq_map, dk_map, dv_map;
  const float* stats;  // as in TiledBackwardParams
  // Varlen: block lists as in DeltaParams, and the counter of work tiles that thread blocks have taken.
  const void *q_blocks, *k_blocks;
  unsigned* counter;
  // If two thread blocks share the query heads of a key block: the sums of the first one to end, and counters at 0.
  float* acc;
  unsigned* semaphores;
  ProblemParams problem;
  int num_q_blocks, num_k_blocks;
  int heads_in_l2, stats_rows;  // heads_in_l2: query or kv heads whose blocks start longest first
  int first_semaphore;          // the first semaphore of this gradient
};

// portable/block_mask.cu.
struct BlockMaskParams {
  signed char* mask_tiles;  // (batch or 1, heads, mask_tiles_q, mask_tiles_k), contiguous
  ProblemParams problem;
  int num_mask_tiles;  // over all sequences and heads
  int heads;           // query heads, or 1 if they share their mask tiles
  int mask_tiles_q, mask_tiles_k;
  int of_call;  // 1 if tiles that the problem's mask hides are not evaluated
  int unused;
};

// portable/tile_counts.cu.
struct TileCountsParams {
  Operand dq;
  const signed char* mask_tiles;  // as in ModParams
  int* tile_counts;               // (batch, heads_q, num_q_blocks)
  // Lists of steps, one per sequence, query head (ordered by kv head) and key block. Sequences, or heads, that share
  // their mask tiles share lists. A list holds 32 * list_lines steps.
  int* key_steps;
  // (…, num_k_blocks) per kv head with lists: key blocks by falling step count, and the counts. Null: key blocks are
  // taken in index order.
  int *key_order, *step_counts;
  unsigned* semaphores;  // from first_counter on, one zero per order
  ProblemParams problem;
  long long mask_tiles_batch, mask_tiles_head;
  int mask_tiles_row;
  int num_q_blocks, num_k_blocks, block_q;  // block_q: 64 or 128
  // Strides over sequences and kv heads, from list to list; 0 if shared.
  int list_stride_batch, list_stride_head;
  int list_lines, first_counter, deterministic;
  int count_blocks;  // thread blocks that count tiles; the thread blocks after them list steps
};

constexpr int kMaxMergeStates = 248;

// portable/merge.cu: states over disjoint keys. outs are (batch, seqlen, heads, head_dim_v), lses (batch, heads,
// seqlen), all contiguous.
struct MergeParams {
  const void* outs[kMaxMergeStates];
  const float* lses[kMaxMergeStates];
  void* out;
  float* lse;
  long long num_elements;  // elements of one out
  int head_dim_v, heads, seqlen, num_states;
};

// portable/append_kv.cu. k_cache and v_cache are (num_pages, page_size, heads_kv, …); without page_table, each sequence
// has one page. k and v are (batch, rows_k, heads_kv, …), q and q_out (batch, rows_q, heads_q, head_dim). With
// cu_seqlens, rows are packed and the first axis is 1.
struct AppendParams {
  Operand k_cache, v_cache, k, v, q, q_out;
  const int* seqused_k;                     // (batch)
  const int *page_table, *cache_batch_idx;  // (batch, max_pages) and (batch), or null
  const int *cu_seqlens_k, *cu_seqlens_q;   // (batch + 1), or null
  const void *rotary_cos, *rotary_sin;      // (positions, rotary_dim / 2), or null
  // Row strides in elements.
  long long page_table_stride, rotary_cos_stride, rotary_sin_stride;
  int batch, rows_k, rows_q;             // batch: number of sequences
  int heads_kv, heads_q;                 // heads_q: 0 without q
  int head_dim_v, head_dim, rotary_dim;  // rotary_dim: 0 without rotation
  int pieces, pieces_v;                  // threads per head of k or q, and of v
  int num_pages, page_size, max_pages;   // max_pages: per sequence
  int positions;                         // rows of the rotary tables
  int wide_table;                        // 1 if rotary_cos and rotary_sin are float32, whatever the dtype of the rows
  int interleaved, q_same_position;
  int num_key_blocks;  // thread blocks of keys and values; the thread blocks of queries follow
};
