// The tile scheduler of backward on Hopper: key blocks, each with the query tiles that see some of its keys.
#pragma once
#include "../../common/select.cuh"
#include "../pipeline/work_ring.cuh"
#include "../pipeline/all_steps.cuh"
#include "visible_keys.cuh"

// Key blocks index … index_end - 1, counted over batch and kv heads. A thread block takes them one after the other,
// each over its query heads. It may share the first and the last one, and then takes some of their steps.
struct DenseKeyBlocks : AnyKeyBlock {
  struct SchedulerStorage {
    // The number of this thread block: its index or, with a counter, its place in the order of start.
    unsigned cta;

    __device__ void init() const {}

    // One thread calls, once. A thread block then waits only for lower numbers (sm90/backward/dq_accumulate.cuh), which
    // have started. Indices give no such order: CUDA promises none.
    __device__ __forceinline__ void take_number(const Params& p) const {
      if (kSharesHeads) return;
      unsigned taken = blockIdx.x;
      if (p.counter != nullptr) taken = atomicInc(p.counter, gridDim.x - 1);
      st_shared_u32(smem_address(&cta), taken);
    }
  };

  int index, index_end;
  // Steps of the first key block that others take; the end of the steps of the last one.
  int skipped, last_steps;

  __device__ __forceinline__ DenseKeyBlocks(const Params& p, const SchedulerStorage& storage) : AnyKeyBlock(p) {
    const ProblemParams& problem = p.problem;
    if (blockIdx.x >= p.whole_blocks) {
      const unsigned all_steps = p.num_q_blocks * problem.heads_per_kv;
      const unsigned from = (blockIdx.x - p.whole_blocks) * p.shared_steps;
      const unsigned last = const_min(from + p.shared_steps, p.shared_keys * all_steps) - 1;
      index = p.shared_first + from / all_steps, skipped = from % all_steps;
      index_end = p.shared_first + last / all_steps + 1, last_steps = last % all_steps + 1;
      return;
    }
    const unsigned heads = problem.batch * (problem.heads_q / problem.heads_per_kv);
    const unsigned num_runs = (p.num_k_blocks + p.key_blocks - 1) / p.key_blocks;
    const unsigned cta = kSharesHeads ? blockIdx.x >> parts_log2(p) : ld_shared_u32(smem_address(&storage.cta));
    const HeadBlock run = lpt_order(cta, num_runs, heads, p.heads_in_l2);
    index = run.head * p.num_k_blocks + run.block * p.key_blocks, skipped = 0;
    index_end = const_min<int>(index + p.key_blocks, (run.head + 1) * p.num_k_blocks), last_steps = 1 << 30;
  }

  // Goes to the next key block; returns false if there is none.
  __device__ __forceinline__ bool next_block() {
    if (index == index_end) return false;
    go_to(index);
    const Range heads = heads_of_part(params, blockIdx.x & ((1u << parts_log2(params)) - 1));
    const int tiles = query_tiles().count();
    steps = {heads.begin * tiles, heads.end * tiles};
    steps.begin += skipped, skipped = 0;
    if (++index == index_end) steps.end = const_min(steps.end, last_steps);
    return true;
  }

  // True if other thread blocks also take steps of the current key block; then its index among such key blocks.
  __device__ __forceinline__ bool is_shared() const {
    return kSharesHeads || (blockIdx.x >= params.whole_blocks &&
                            steps.end - steps.begin < params.num_q_blocks * params.problem.heads_per_kv);
  }
  __device__ __forceinline__ unsigned nth_shared() const {
    return kSharesHeads ? blockIdx.x >> parts_log2(params) : index - 1 - params.shared_first;
  }
  // The thread blocks that share it.
  __device__ __forceinline__ unsigned num_sharers() const {
    if (kSharesHeads) return 1u << parts_log2(params);
    const unsigned nth = nth_shared(), all_steps = params.num_q_blocks * params.problem.heads_per_kv;
    return ((nth + 1) * all_steps - 1) / params.shared_steps - nth * all_steps / params.shared_steps + 1;
  }
  // Its counter follows the semaphores of all dq tiles.
  __device__ __forceinline__ unsigned* shared_counter() const { return semaphores_behind() + nth_shared(); }
};

// Key blocks of variable-length sequences, which delta.cu has listed (portable/key_blocks.cuh). As many thread blocks
// as there are SMs take them one by one. A grid for all possible key blocks would have many empty ones, and a thread
// block takes 2 to 3 µs to start.
struct VarlenKeyBlocks : WorkRing<4, kNumThreads / 32> {
  struct SchedulerStorage : Ring {
    __device__ void take_number(const Params&) const {}
  };

  // Words of a work tile behind its kv head: its index among shared key blocks, its part, and the number of parts. A
  // part is a range of steps.
  enum Share { kNth, kPart, kParts };

  const Params& params;
  int kv_head, block;
  // Query tiles of a head. Held, so that steps read no lengths (L5).
  int held_query_tiles;
  Range steps;

  __device__ __forceinline__ VarlenKeyBlocks(const Params& p, const SchedulerStorage& in_memory)
      : WorkRing(in_memory), params(p) {}

  __device__ __forceinline__ QueryTiles query_tiles() const { return QueryTiles(*this, sequence().mask(), block); }
  __device__ __forceinline__ int num_query_tiles() const { return held_query_tiles; }

  // Thread blocks wait only for work tiles taken before theirs, which are running (sm90/backward/dq_accumulate.cuh).
  __device__ __forceinline__ void schedule() const {
    const unsigned next = number + 1;
    wait_place(next);
    if (threadIdx.x % 32 == 0) {
      const ProblemParams& problem = params.problem;
      const int4 shares = __ldcg(static_cast<const int4*>(params.key_shares));
      const unsigned index = atomicAdd(taken(), 1u);
      const unsigned heads = problem.heads_q / problem.heads_per_kv, listed = shares.x, whole = shares.y;
      const unsigned parts = index < whole ? 1 : shares.z, of_parts = (index - whole) / parts;
      const unsigned work_idx = index < whole ? index : whole + of_parts;
      if (work_idx < listed * heads) {
        const HeadBlock at = lpt_order(work_idx, listed, heads, params.heads_in_l2);
        push(next, params.key_list, at.block, {at.head, of_parts, index - whole - of_parts * parts, parts});
      } else {
        end(next);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool next_block() {
    if (!go_on()) return false;
    kv_head = scheduled_head(), block = scheduled_block();
    held_query_tiles = (sequence().seqlen_q() + kBlockQ - 1) / kBlockQ;
    steps = {0, query_tiles().count() * params.problem.heads_per_kv};
    if (const int parts = num_sharers(); parts > 1) {
      const int part = share(kPart), each = steps.end / parts, more = steps.end % parts;
      steps.begin = part * each + const_min(part, more);
      steps.end = steps.begin + each + (part < more);
    }
    return true;
  }

  __device__ __forceinline__ bool is_shared() const { return num_sharers() > 1; }
  __device__ __forceinline__ unsigned nth_shared() const { return share(kNth); }
  __device__ __forceinline__ unsigned num_sharers() const { return share(kParts); }
  __device__ __forceinline__ unsigned* shared_counter() const { return semaphores_behind() + nth_shared(); }

 private:
  // Counters behind the semaphores of dq: of shared key blocks, then of work tiles taken.
  __device__ __forceinline__ unsigned* semaphores_behind() const {
    return params.semaphores + params.problem.heads_q * params.num_q_blocks;
  }
  __device__ __forceinline__ unsigned* taken() const { return semaphores_behind() + params.shared_keys; }
};

using KeyBlocks = Select<kVarlen, WithAllSteps<VarlenKeyBlocks>,
                         Select<kBlockSparse, VisibleKeyBlocks, WithAllSteps<DenseKeyBlocks>>>;

// The current key block, with the memory that its steps use.
struct KeyWork : KeyBlocks {
  using KeyBlocks::KeyBlocks;

  // The index of a tile of dq: of its semaphore, and of its accumulator.
  __device__ __forceinline__ unsigned dq_tile(int head, int m) const {
    const auto of = sequence();
    return static_cast<unsigned>(of.query_head(head)) * params.num_q_blocks + of.padded_query(0) / kBlockQ + m;
  }

  // The address of lse (and then delta) of query 0 of a head.
  __device__ __forceinline__ const float* stats(int head) const {
    return params.stats + 2 * (sequence().query_head(head) * params.stats_rows) + sequence().padded_query(0);
  }
};
