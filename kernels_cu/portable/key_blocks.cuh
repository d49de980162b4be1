// Block lists of variable-length sequences, which delta.cu writes. For sm90/backward/backward.cu: the key blocks that
// some query sees. For sm90/backward_dq_dkv/backward_dq_dkv.cu: the block in each slot of queries and keys. Gradients
// of keys without queries are set to zero.
#pragma once
#include "../common/visible_rows.cuh"
#include "../common/vector.cuh"

// Assigns key blocks, counted over the list and kv heads, to thread blocks (full to the end, L35). With last_steps,
// only the key blocks of the last wave are shared, if that is faster. Otherwise all are, until there are three waves
// and at least least_parts thread blocks per key block (L34).
__device__ inline KeyShares shares_of(const DeltaParams& p, int listed) {
  constexpr int kAddingUp = 6;  // adding up one part of a key block takes as long as 6 steps
  const int all = listed * (p.problem.heads_q / p.problem.heads_per_kv), rest = all % p.takers;
  KeyShares shares{listed, all, 1};
  if (p.last_steps > 0) {
    float best = p.last_steps;
    for (int parts = 2; parts <= p.most_parts && rest > 0 && rest <= p.shared_keys; ++parts) {
      const int rounds = (rest * parts + p.takers - 1) / p.takers;
      const float steps = rounds * (__fdividef(p.last_steps, parts) + kAddingUp);
      if (steps < best) best = steps, shares.parts = parts, shares.whole = all - rest;
    }
  } else if (all <= p.shared_keys) {
    const auto wants_more = [&] { return all * shares.parts < 3 * p.takers || 2 * shares.parts <= p.least_parts; };
    while (2 * shares.parts <= p.most_parts && wants_more()) shares.parts *= 2;
    if (shares.parts > 1) shares.whole = 0;
  }
  return shares;
}

// Sorts the last key blocks of the list: longest first, and key blocks of a sequence in their order. All threads call
// it. The others stay in place: neighbours use the same rows of q, which L2 then holds.
__device__ inline void sort_last(const DeltaParams& p, VisibleBlock* list, int listed) {
  __shared__ int lengths[kNumThreads];
  const int count = min(listed, min(p.sorted_blocks, kNumThreads)), i = threadIdx.x;
  VisibleBlock* const last = list + listed - count;
  __syncthreads();  // other threads wrote the list
  VisibleBlock entry;
  if (i < count) {
    entry = last[i];
    // Length without a mask: the number of queries. Under a causal mask: the number of keys from this block on.
    lengths[i] = p.last_steps > 0 ? entry.seqlen_q : entry.seqlen_k - entry.block * p.block_k;
  }
  __syncthreads();
  if (i >= count) return;
  int rank = 0;
  for (int other = 0; other < count; ++other) {
    rank += lengths[other] > lengths[i] || (lengths[other] == lengths[i] && other < i);
  }
  last[rank] = entry;
}

// Writes the list and its assignment to thread blocks. Sequences follow each other; within sequences_together of them
// come all first key blocks, then all second ones, and so on. One thread block calls it. With a list, the kernel gets
// the number of key blocks and the data of each by one copy.
__device__ inline void list_key_blocks(const DeltaParams& p) {
  constexpr int kWarps = kNumThreads / 32;
  __shared__ int of_warps[kWarps], counts[kNumThreads];
  const ProblemParams& problem = p.problem;
  VisibleBlock* const list = static_cast<VisibleBlock*>(p.key_list);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int listed = 0;
  // The list is empty if cu_seqlens decrease: tiles of dq would have semaphores that no block signals, and waits would
  // never end.
  const bool in_order = axis_of_queries(problem).is_in_order() && axis_of_keys(problem).is_in_order();
  const int batch = __syncthreads_and(in_order) ? problem.batch : 0;
  for (int first = 0; first < batch; first += kNumThreads) {
    const int number = first + threadIdx.x;
    const VarlenSequence sequence(problem, number);
    const VisibleRows rows(problem, sequence);
    const ListedSeqlens seqlens(sequence, number);
    const int count = (rows.seqlen_k + p.block_k - 1) / p.block_k;
    int end = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, step);
      end += lane >= step ? other : 0;
    }
    counts[threadIdx.x] = count;
    if (lane == 31) of_warps[warp] = end;
    __syncthreads();
    end += listed;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
      end += other < warp ? of_warps[other] : 0;
      listed += of_warps[other];
    }
    __syncthreads();
    // A warp writes the blocks of its sequences one after the other, at indices that alternate with other sequences'.
#pragma unroll 1
    for (unsigned left = __ballot_sync(0xffffffffu, count > 0); left != 0; left &= left - 1) {
      const int source = __ffs(left) - 1, blocks = __shfl_sync(0xffffffffu, count, source);
      const int first_lane = source / p.sequences_together * p.sequences_together;
      const int begin = __shfl_sync(0xffffffffu, end - count, first_lane);
      const VisibleRows same = rows.of_lane(source);
      const ListedSeqlens same_seqlens = seqlens.of_lane(source);
#pragma unroll 1
      for (int block = lane; block < blocks; block += 32) {
        int to = begin;
#pragma unroll 1
        for (int other = first_lane; other < first_lane + p.sequences_together; ++other) {
          const int others = counts[32 * warp + other];
          to += min(others, block) + (other < source && others > block);
        }
        // Bounded, because another kernel may write to the lengths while they are read.
        if (unsigned(to) < p.max_key_blocks) list[to] = VisibleBlock(same, same_seqlens, block);
      }
    }
  }
  listed = clamped(listed, p.max_key_blocks);
  sort_last(p, list, listed);
  if (threadIdx.x == 0) *static_cast<KeyShares*>(p.key_shares) = shares_of(p, listed);
}

// Sets a row of a gradient to zero, with kLanes threads.
template <int kLanes>
__device__ __forceinline__ void zero_row(const Operand& x, const Place& place, int head, int row, int columns) {
  char* const to = place.address(x, kElementBytes, head, row);
  for (int column = threadIdx.x % kLanes * kChunkElements; column < columns; column += kLanes * kChunkElements) {
    store_chunk(to, column, columns - column, x.aligned, Chunk<kDType>{});
  }
}

// Writes the block of a slot: queries that see a key (from the last block on), or keys that are seen. One warp calls
// it. In the main kernel the search would take about 1 µs per head and gradient.
template <bool kOfQueries>
__device__ void write_slot(const ProblemParams& problem, void* blocks, int slot) {
  const Axis axis = kOfQueries ? axis_of_queries(problem) : axis_of_keys(problem);
  const RowSlots row_slots = RowSlots::of_slot(axis, slot, kPaddedSlot);
  const VarlenSequence sequence(problem, row_slots.sequence);
  const VisibleRows rows(problem, sequence);
  const int row = kOfQueries ? row_slots.row_from_end(slot, kPaddedSlot) : row_slots.row(slot, kPaddedSlot);
  const bool exists = row >= 0 && row < (kOfQueries ? rows.seqlen_q : rows.seqlen_k);
  const ListedSeqlens seqlens(sequence, row_slots.sequence);
  const VisibleBlock block(rows, seqlens, exists ? row / kPaddedSlot : VisibleBlock::kNone);
  if (threadIdx.x % 32 == 0) static_cast<VisibleBlock*>(blocks)[slot] = block;
}

// Writes the blocks of a slot of both sides. All threads call it.
__device__ inline void write_slots(const DeltaParams& p, int slot) {
  if (p.q_blocks == nullptr) return;
  const int warp = threadIdx.x / 32;
  if (warp == 0) write_slot<true>(p.problem, p.q_blocks, slot);
  if (warp == 1) write_slot<false>(p.problem, p.k_blocks, slot);
}

// Sets dk and dv to zero for the keys of a slot that no query sees.
template <int kLanes>
__device__ void zero_hidden_keys(const DeltaParams& p, int slot) {
  if constexpr (kAccumulates) return;
  const ProblemParams& problem = p.problem;
  const RowSlots row_slots = RowSlots::of_slot(axis_of_keys(problem), slot, kPaddedSlot);
  const VarlenSequence sequence(problem, row_slots.sequence);
  const Range visible = sequence.visible_keys();
  const Place place{sequence.k_place.batch, row_slots.begin};
  const int begin = row_slots.row(slot, kPaddedSlot), end = min(begin + kPaddedSlot, row_slots.num_rows());
  for (int key = begin + threadIdx.x / kLanes; key < end; key += kNumThreads / kLanes) {
    if (key >= visible.begin && key < visible.end) continue;
    for (int head = 0; head < problem.heads_q / problem.heads_per_kv; ++head) {
      zero_row<kLanes>(p.dk, place, head, key, problem.head_dim);
      zero_row<kLanes>(p.dv, place, head, key, problem.head_dim_v);
    }
  }
}
