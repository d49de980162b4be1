// The producers of forward and lse, which copy by TMA: one warp loads k and v, others load q. Dense kernels schedule
// work in the warp of k and v; block-sparse and varlen kernels have a scheduler warp.
#pragma once
#include "../../common/float_rows.cuh"
#include "../../common/swizzle.cuh"
#include "../../ptx/cp_async.cuh"
#include "../../ptx/grid.cuh"
#include "../../ptx/load.cuh"
#include "scheduler.cuh"
#include "varlen_producer.cuh"

// A warp that publishes work tiles. All lanes call `push`, and one thread writes.
struct WorkPusher : Role {
  template <class AnyWork>
  __device__ __forceinline__ void push(unsigned i, const AnyWork& work) const {
    if (is_leader) smem.push(i, work);
    __syncwarp();
  }
};

// Warp 0: fills the ring and, unless block-sparse, schedules work.
template <class AnyWork>
struct DenseKeyProducer : WorkPusher {
  PipelineState ring;
  LoadedTile loaded;

  // Loads key tile n of k or v into the ring.
  template <int kPanels, bool kPushes>
  __device__ __forceinline__ void load(const TensorMap& map, int n, const AnyWork& work) {
    const unsigned full = smem.kv_full + 8 * ring.slot, target = smem.kv + ring.slot * kBytesSlot;
    // Computed before the wait: nothing stands between the wait and the copy (L17).
    const auto rows = work.sequence(params.problem).visible_keys_from(n * kBlockK);
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (is_leader) {
      if constexpr (kPushes) loaded.push(smem, ring.slot);
      mbarrier_arrive_expect_tx(full, kPanels * kPanelBytesK);
      load_panels<kPanels>(map, target, kPanelBytesK, full, rows, work.kv_head);
    }
    __syncwarp();
    ring.advance();
  }

  __device__ __forceinline__ void load_k(const AnyWork& work, int n) { load<kPanelsQk, true>(params.k_map, n, work); }

  __device__ __forceinline__ void load_v(const AnyWork& work, int n) {
    if constexpr (kPanelsV > 0) load<kPanelsV, false>(params.v_map, n, work);
  }

  // Loads the v of a query block's last p v, which runs during the next query block.
  __device__ __forceinline__ void load_last_v(unsigned i, int last) {
    const AnyWork work = smem.work(i);
    load_v(work, kBlockSparse ? last : work.keys.begin);
  }

  // Work tiles are read back from shared memory, since they would hold registers (L5).
  __device__ __forceinline__ void run(const AnyWork& first) {
    TileScheduler scheduler;
    if constexpr (!kBlockSparse) push(0, first);
    unsigned i = 0;
#pragma unroll 1
    for (;; ++i) {
      if constexpr (kBlockSparse) smem.wait_work(i);
      const AnyWork work = smem.work(i);
      if (!work.exists()) break;
      const DescendingTiles tiles = work.keys;
      // The key tile before which the next work tile is requested: late, as bursts of copies cost (L19).
      const int request_tile = params.counter == nullptr ? max(tiles.begin, tiles.end - 4)
                               : kBlockSparse            ? min(tiles.begin + 2, tiles.end - 1)
                                                         : tiles.begin;
#pragma unroll 1
      for (int n = tiles.first(); tiles.has(n); n = tiles.next(n)) {
        if constexpr (kBlockSparse) {
          if (n == request_tile && is_leader) mbarrier_arrive(smem.requested(i));
        } else if (n == request_tile) {
          scheduler.advance(params);
          push(i + 1, scheduler.work(params));
        }
        const int before = kBlockSparse ? loaded.n() : n + 1;
        loaded.find_next(params, work, n == tiles.first());
        load_k(work, kBlockSparse ? loaded.n() : n);
        if (n < tiles.end - 1) load_v(work, before);
        else if (kNextScoresFirst && i > 0) load_last_v(i - 1, before);
      }
      if (!kNextScoresFirst) load_v(work, kBlockSparse ? loaded.n() : work.keys.begin);
    }
    if (kNextScoresFirst) load_last_v(i - 1, loaded.n());
  }
};

// Schedules work if block-sparse, in a warp of its own that also counts the visible tiles.
template <class AnyWork>
struct DenseSchedulerWarp : WorkPusher {
  __device__ __forceinline__ void run(const AnyWork& first) const {
    TileScheduler scheduler;
    push(0, first);
    bool exists = first.exists();
#pragma unroll 1
    for (unsigned i = 0; exists; ++i) {
      smem.wait_request(i);
      scheduler.advance(params);
      const AnyWork next = scheduler.work(params);
      push(i + 1, next);
      exists = next.exists();
    }
  }
};
static_assert(!kBlockSparse || kQueryWarps < kSchedulerWarp, "the scheduler warp has no other role");

// Schedules work tiles of variable-length sequences. It is a warp of its own, as the other producers have too few
// registers left, and none should wait while it reads lengths.
template <class Scheduler>
struct SchedulerWarp : Role {
  __device__ __forceinline__ void run() const {
    if constexpr (kOneTilePerBlock) run_ahead();
    else run_on();
  }

 private:
  // Publishes work tile i.
  __device__ __forceinline__ void publish(unsigned i) const {
    if (i == 0) bar_sync(kBarriersMade, 64);
    if (is_leader) smem.publish(i);
    __syncwarp();
    if (i > 0) return;
    bar_arrive(kFirstWork, kNumThreads);
    // Waited for here, as synccheck reports a barrier in memory that no thread waits for (L41).
    smem.wait_published(i);
  }

  // Schedules the only work tile of the thread block. It is computed while earlier kernels still run, and loaded as
  // soon as they end (L55). As they may have changed the lengths, it is then computed again. If it differs, the new one
  // is work tile 1, and work tile 0 is void.
  __device__ __forceinline__ void run_ahead() const {
    unsigned i = 0;
    // A loop, so that this code stands once: code is cold at each launch (L50).
#pragma unroll 1
    for (bool is_ahead = true;; is_ahead = false) {
      Scheduler scheduler;
      scheduler.begin(params);
      QueryWork work = scheduler.find(params);
      const bool exists = work.exists();
      if (i > 0) {
        if (exists && work.is(smem.work(0))) work.row_begin = kNoWork;
        else if (!exists) work.row_begin = kVoid;
      }
      // Published ahead only if it exists; otherwise the other warps would exit.
      if (exists || !is_ahead) {
        if (is_leader) smem.write(i, work);
        publish(i);
        ++i;
      }
      if (!is_ahead) break;
      wait_kernels_ahead();
    }
    QueryWork none;
    none.row_begin = kNoWork;
    if (is_leader) smem.push(i, none);
  }

  // All work tiles come from one site, as code is cold at each launch (L50).
  __device__ __forceinline__ void run_on() const {
    Scheduler scheduler;
    scheduler.begin(params);
    bool exists = true, is_second = false;  // is_second: of a pair
#pragma unroll 1
    for (unsigned i = 0; exists; ++i) {
      if (is_second) {
        scheduler.write_second(params, smem, i);
      } else {
        if (i > 0) scheduler.advance(params);
        exists = scheduler.write_work(params, smem, i);
      }
      publish(i);
      // A pair's second work tile is published without a request, since it is computed already.
      if (is_second) smem.wait_request(i - 1);
      is_second = !is_second && scheduler.is_pair();
      if (exists && !is_second) smem.wait_request(i);
    }
  }
};

// Issues the loads of a warpgroup's rows of q, counted at the barrier. One warp calls.
template <class Params, class AnyWork>
__device__ __forceinline__ void load_queries(const Params& params, const AnyWork& work, int group, unsigned target,
                                             unsigned barrier, int&, bool is_leader) {
  if (!is_leader) return;
  const auto rows = work.sequence(params.problem).queries_from(work.row_begin + kGroupRows * group);
  mbarrier_arrive_expect_tx(barrier, kBytesQ / kNumConsumers);
  load_panels<kPanelsQk>(params.q_map, target, kPanelBytesQ, barrier, boxed(rows, kGroupRows, params.problem.head_dim),
                         work.head);
}

// Fetches the rows of out that a warpgroup will blend into the L2 cache, while the keys are walked. Otherwise the
// epilogue waits for them.
template <class AnyParams, class AnyWork>
__device__ __forceinline__ void prefetch_state(const AnyParams& p, const AnyWork& work, int group) {
  const auto sequence = work.sequence(p.problem);
#pragma unroll
  for (int n = 0; n < kGroupRows; n += 32) {
    const int row = work.row_begin + group * kGroupRows + n + threadIdx.x % 32;
    if (row >= sequence.seqlen_q()) continue;
    const float* const out = float_row(p.out, sequence.out_from(row), work.head);
#pragma unroll
    for (int column = 0; column < kHeadDimV; column += 32) prefetch_l2(out + min(column, p.problem.head_dim_v - 1));
  }
}

// The warps that copy q. Decode has its own overload of load_queries (decode/producer.cuh).
template <class AnyWork>
struct QueryProducer : Role {
  const int first_group, step;

  __device__ __forceinline__ void run() {
    int filled = 0;
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      smem.wait_work(i);
      const AnyWork work = smem.work(i);
      if (!work.exists()) break;
#pragma unroll 1
      for (int group = first_group; group < kNumConsumers; group += step) {
        mbarrier_wait(smem.q_empty(i, group), (i / kQStages + 1) & 1);
        load_queries(params, work, group, smem.q_rows(i, group), smem.q_full(i, group), filled, is_leader);
        if constexpr (kAccumulates) prefetch_state(params, work, group);
        __syncwarp();
      }
    }
  }
};
