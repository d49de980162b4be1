// The producer of keys of sequences of several lengths, for forward and lse on Hopper.
#pragma once
#include "../common/swizzle.cuh"
#include "../ptx/cp_async.cuh"
#include "pages.cuh"

// Warp 0 fills the ring. All loads are made in one place, because the code is long and is read from memory once a launch.
// why AnyWork: only kernels of several lengths have work that can be loaded so.
template <class AnyWork>
struct RaggedKeyProducer : Role {
  RingPosition ring;
  unsigned edge_parity = 0;
  int on_the_way = 0;                      // tiles that threads copy, and that nobody was told of yet
  int page = 0, k_page = 0, v_page = 0;  // of this lane's keys in the next tile, that of k at hand, and that of v

  __device__ __forceinline__ void run() {
    // The tile whose v is still to be loaded, because o += p v follows the scores of the next tile: of which work, which.
    unsigned pending_work = kNone;
    int pending_tile = 0;
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      smem.await_work(i);
      const bool exists = smem.work(i).exists();
      const DescendingTiles tiles = exists ? smem.work(i).keys : TileRange{0, 1};
      // why one turn more: for v of the last tile, after each piece of work or after all of them.
      const int last = tiles.begin - (exists && !kNextScoresFirst);
#pragma unroll 1
      for (int n = tiles.first(); n >= last; --n) {
        const bool has_k = exists && n >= tiles.begin;
        // why so late: L19. why so early: splits are short.
        const int claim_at = kDecodes                    ? tiles.end - 1
                             : params.counter == nullptr ? max(tiles.begin, tiles.end - 4)
                                                         : tiles.begin;
        if (has_k && n == claim_at && leads) mbarrier_arrive(smem.wanted());
#pragma unroll 1
        for (int turn = 0; turn < (kPanelsV > 0 ? 2 : 1); ++turn) {
          const bool is_v = turn == 1;
          const unsigned of = is_v ? pending_work : has_k ? i : kNone;
          if (of != kNone) load(is_v, of, is_v ? pending_tile : n);
        }
        pending_work = has_k ? i : kNone, pending_tile = n, v_page = k_page;
      }
      if (on_the_way > 0) tell_of_all_but<0>();
      if (!exists) break;
    }
  }

 private:
  static constexpr unsigned kNone = ~0u;
  static constexpr int kNoPage = -1;

  // The page of this lane's keys in a tile, if it has any that are seen.
  __device__ __forceinline__ int page_in_tile(const AnyWork& work, int n) const {
    const ProblemParams& problem = params.problem;
    const int begin = threadIdx.x % 32 * params.page_box, key = n * kBlockK + begin;
    if (begin >= kBlockK || key >= work.seen_end) return kNoPage;
    return problem.page_table[work.number * problem.page_table_stride + page_of(params, key)];
  }

  // Loads k or v of tile n of work i into the ring. A lane loads a box: of keys of one page, or the first lane of all.
  __device__ __forceinline__ void load(bool is_v, unsigned i, int n) {
    const ProblemParams& problem = params.problem;
    const AnyWork work = smem.work(i);
    const bool is_paged = problem.page_table != nullptr;
    if (is_paged && params.page_box == 0) {
      copy_keys(is_v, work, n);
      return;
    }
    const int rows = is_paged ? params.page_box : kBlockK, begin = threadIdx.x % 32 * rows;
    const int key = n * kBlockK + begin;
    RaggedMapRows from = work.sequence(problem).seen_keys_from(key);
    bool is_absent = false;
    if (is_paged) {
      if (!is_v) {
        k_page = n == work.keys.end - 1 ? page_in_tile(work, n) : page;
        if (n > work.keys.begin) page = page_in_tile(work, n - 1);  // why so early: it comes from memory
      }
      const int of = is_v ? v_page : k_page;
      const bool is_there = of >= 0 && of < problem.batch_k;
      const int within = key - page_of(params, key) * problem.rows_k;
      const int end = is_there ? smaller(within + work.seen_end - key, problem.rows_k) : 0;
      from = {problem.rows_k, within, end, of};
      is_absent = !is_there && begin < kBlockK && key < work.seen_end;
    }
    const bool lacks_some = __any_sync(0xffffffffu, is_absent);
    // TMA makes zeros of keys behind the last one that is seen, but not of those before the first.
    const bool has_edge = is_v && n * kBlockK < work.seen_begin;
    const unsigned full = smem.kv_full + 8 * ring.slot, barrier = has_edge ? smem.edge_full : full;
    const unsigned target = smem.kv + ring.slot * kBytesSlot;
    const int panels = is_v ? kPanelsV : kPanelsQk;
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (is_paged && !is_v) tell_present_keys(params, smem, work, n, ring.slot, lacks_some);
    if (leads) mbarrier_arrive_expect_tx(barrier, panels * kPanelBytesK);
    __syncwarp();
    if (begin < kBlockK) {
      const RaggedBox box = boxed(from, rows, is_v ? problem.head_dim_v : problem.head_dim);
      const TensorMap& map = is_v ? params.v_map : params.k_map;
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
        load_box(target + panel * kPanelBytesK + begin * 128, map, barrier, panel * kPanelColumns, box, work.kv_head);
      }
    }
    __syncwarp();
    if (has_edge) {
      mbarrier_wait(smem.edge_full, edge_parity);
      edge_parity ^= 1;
      clear_hidden_before(work, n, target);
      if (leads) mbarrier_arrive(full);
    }
    ring.advance();
  }

  // The same by threads, two for a key, where pages are of any size.
  __device__ __forceinline__ void copy_keys(bool is_v, const AnyWork& work, int n) {
    const ProblemParams& problem = params.problem;
    const Operand& x = is_v ? params.v : params.k;
    const int* const table = problem.page_table + work.number * problem.page_table_stride;
    const int lane = threadIdx.x % 32, columns = is_v ? problem.head_dim_v : problem.head_dim;
    const int panels = is_v ? kPanelsV : kPanelsQk;
    int pages[4];  // of 32 keys each, one in each lane
    bool is_absent = false;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int row = 32 * part + lane, key = n * kBlockK + row;
      const bool is_needed = row < kBlockK && key < work.seen_end;
      pages[part] = is_needed ? table[page_of(params, key)] : kNoPage;
      if (pages[part] >= problem.batch_k) pages[part] = kNoPage;
      is_absent |= is_needed && pages[part] < 0;
    }
    const bool lacks_some = __any_sync(0xffffffffu, is_absent);
    mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
    if (!is_v) tell_present_keys(params, smem, work, n, ring.slot, lacks_some);
    const unsigned target = smem.kv + ring.slot * kBytesSlot;
#pragma unroll
    for (int part = 0; part < kBlockK / 16; ++part) {
      const int row = 16 * part + lane / 2, key = n * kBlockK + row;
      const int page = __shfl_sync(0xffffffffu, pages[part / 2], row % 32);
      const bool is_seen = page >= 0 && !(is_v && key < work.seen_begin);
      const int within = key - page_of(params, key) * problem.rows_k;
      const char* const from = Place{is_seen ? page : 0, 0}.address(x, 2, work.kv_head, is_seen ? within : 0);
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int chunk = 2 * pair + lane % 2, column = panel * kPanelColumns + 8 * chunk;
          const int bytes = is_seen ? clamped((columns - column) * 2, 16) : 0;
          cp_async_16_zfill(target + panel * kPanelBytesK + Swizzle<8>::offset(row, chunk),
                            bytes > 0 ? from + 2 * column : from, bytes);
        }
      }
    }
    cp_async_commit();
    ring.advance();
    // why not at once: copies of several tiles are then on their way. why no more: the consumers release a slot only
    // after they were told of the two that follow it.
    constexpr int kAhead = kStages - 3 < 3 ? kStages - 3 : 3;
    if (++on_the_way > kAhead) tell_of_all_but<kAhead>();
  }

  // Waits for all tiles that threads copy but the latest kPending, and tells the consumers of them.
  template <int kPending>
  __device__ __forceinline__ void tell_of_all_but() {
    cp_async_wait<kPending>();
    fence_proxy_async();
    __syncwarp();
    for (; on_the_way > kPending; --on_the_way) {
      const unsigned behind = ring.slot + kStages - on_the_way, slot = behind < kStages ? behind : behind - kStages;
      if (leads) mbarrier_arrive(smem.kv_full + 8 * slot);
    }
  }
};
