// The tile scheduler of backward on Hopper under a mask_mod.
#pragma once
#include "../../common/fragment.cuh"
#include "../pipeline/key_block.cuh"
#include "../pipeline/step_ring.cuh"

// Key blocks under a mask_mod, whose steps portable/tile_counts.cu has listed. As many thread blocks as there are SMs
// take them one by one. Their numbers of steps differ, and a thread block takes 2 to 3 µs to start. The loading warp
// takes them, and pushes them and their steps to the other warps.
struct VisibleKeyBlocks : AnyKeyBlock, StepRing<kNumWarps - 1> {
  using Steps = StepRing<kNumWarps - 1>;

  struct SchedulerStorage : Steps::Ring {
    uint4 noted;

    __device__ void take_number(const Params&) const {}
  };

  unsigned noted;  // address of the loading warp's notes: its current key block
  int part;        // part of the query heads, in the loading warp only

  __device__ __forceinline__ VisibleKeyBlocks(const Params& p, const SchedulerStorage& in_memory)
      : AnyKeyBlock(p), Steps(in_memory), noted(smem_address(&in_memory.noted)) {}

  // Pops the next key block and goes to it; returns false at the end.
  __device__ __forceinline__ bool next_block() {
    const TileStep tile_step = pop();
    if (tile_step.is_end()) return false;
    go_to(tile_step.head);
    return true;
  }

  // The loading warp's next_block: takes a key block, and pushes it to the others.
  __device__ __forceinline__ bool lead_block() {
    const bool any = take_block();
    if (threadIdx.x % 32 == 0) {
      st_shared_v4(noted, {unsigned(batch), unsigned(kv_head), unsigned(block), unsigned(part)});
    }
    push(any ? TileStep{index(), VisibleTile(0)} : TileStep{0, VisibleTile::end()});
    return any;
  }

  // Calls f(query head, query tile, true if the mask_mod shows all of it) for every step. `step` counts over all key
  // blocks.
  template <class F>
  __device__ __forceinline__ void for_each_step(unsigned& step, F f) {
#pragma unroll 1
    for (TileStep tile_step = pop(); !tile_step.is_end(); tile_step = pop(), ++step) {
      f(tile_step.head, tile_step.tile.n(), tile_step.tile.is_full());
    }
  }

  // The loading warp's for_each_step: pushes each step, and the end marker, to the others.
  template <class F>
  __device__ __forceinline__ void lead_each_step(unsigned& step, F f) {
    look_up();
    int head = query_heads().begin;
#pragma unroll 1
    for (; look_up(), head < query_heads().end; ++head) {
      int listed = 0;
#pragma unroll 1
      for (int i = 0;; ++i, ++step) {
        look_up();
        if (i % 32 == 0) listed = listed_steps(head, i / 32);
        const VisibleTile tile(__shfl_sync(0xffffffffu, listed, i % 32));
        if (tile.is_end()) break;
        push({head, tile});
        look_up();
        f(head, tile.n(), tile.is_full());
      }
    }
    push({0, VisibleTile::end()});
  }

  __device__ __forceinline__ bool is_shared() const { return kSharesHeads; }
  __device__ __forceinline__ unsigned nth_shared() const { return index(); }
  __device__ __forceinline__ unsigned num_sharers() const { return 1u << parts_log2(params); }
  __device__ __forceinline__ unsigned* shared_counter() const { return semaphores_behind() + nth_shared(); }

 private:
  // Takes the next key block; returns false if there is none. All lanes of the loading warp call. Thread blocks wait
  // only for work tiles taken before theirs, which are running (sm90/backward/dq_accumulate.cuh).
  __device__ __forceinline__ bool take_block() {
    unsigned number = 0;
    if (threadIdx.x % 32 == 0) number = atomicAdd(semaphores_behind() + params.shared_keys, 1u);
    number = __shfl_sync(0xffffffffu, number, 0);
    if (number >= params.whole_blocks) return false;
    const unsigned heads_kv = params.problem.heads_q / params.problem.heads_per_kv;
    const HeadBlock at = lpt_order(number >> parts_log2(params), params.num_k_blocks, params.problem.batch * heads_kv,
                                   params.heads_in_l2);
    part = number & ((1u << parts_log2(params)) - 1);
    batch = at.head / heads_kv, kv_head = at.head - batch * heads_kv, block = at.block;
    if (params.key_order != nullptr) {
      block = __ldg(params.key_order + static_cast<size_t>(list_head()) * params.num_k_blocks + block);
    }
    return true;
  }

  // The index of the current key block, over batch and kv heads.
  __device__ __forceinline__ int index() const {
    const ProblemParams& problem = params.problem;
    return (batch * (problem.heads_q / problem.heads_per_kv) + kv_head) * params.num_k_blocks + block;
  }

  // The query heads of the loading warp's steps.
  __device__ __forceinline__ Range query_heads() const {
    const int first = kv_head * params.problem.heads_per_kv;
    const Range heads = heads_of_part(params, part);
    return {first + heads.begin, first + heads.end};
  }

  // Returns 32 listed steps of the current key block with a query head, one in each lane. A list goes on in the next
  // lines.
  __device__ __forceinline__ int listed_steps(int head, int line) const {
    const int group = params.problem.heads_per_kv;
    unsigned list = list_head();
    if (params.list_stride_head > 0) list = list * group + (head - kv_head * group);
    const unsigned first = (list * params.num_k_blocks + block) * params.list_lines;
    return __ldg(params.key_steps + 32ull * (first + line) + fresh_thread() % 32);
  }

  // Returns the index of the kv head's list; kv heads may share a list.
  __device__ __forceinline__ unsigned list_head() const {
    return batch * params.list_stride_batch + kv_head * params.list_stride_head;
  }

  // Reads the current key block from the notes, again at each use, as it would hold registers (L5).
  __device__ __forceinline__ void look_up() {
    unsigned x[4];
    ld_shared_v4(x, noted);
    batch = x[0], kv_head = x[1], block = x[2], part = x[3];
  }
};
