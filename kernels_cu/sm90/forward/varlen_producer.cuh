// The producers of keys of variable-length sequences for forward, lse and decode on Hopper.
#pragma once
#include "../../common/fragment.cuh"
#include "pages.cuh"

// The common part of the warps that fill the ring with keys. A template, as only varlen kernels have work tiles and
// parameters with these members.
template <class AnyWork, class Params>
struct VarlenProducer {
  const Params& params;
  const Addresses& smem;
  const bool is_leader = threadIdx.x % 32 == 0;
  PipelineState ring;
  unsigned edge_parity = 0;

  __device__ __forceinline__ VarlenProducer(const Params& p, const Addresses& addresses) : params(p), smem(addresses) {}

  // Requests the next work tile if it is due before key tile n of work tile i. Early requests cause bursts of copies,
  // which cost (L19). But scheduling takes as long as two tiles, and splits of decode are short.
  __device__ __forceinline__ void request_work_at(int n, unsigned i, const TileRange& tiles) const {
    const int at = kDecode                     ? tiles.end - 1
                   : params.counter == nullptr ? max(tiles.begin, tiles.end - 4)
                                               : min(tiles.begin + 2, tiles.end - 1);
    if (n == at && is_leader) mbarrier_arrive(smem.requested(i));
  }

  __device__ __forceinline__ unsigned target() const { return smem.kv + ring.slot * kBytesSlot; }
  __device__ __forceinline__ unsigned full() const { return smem.kv_full + 8 * ring.slot; }
  __device__ __forceinline__ void wait_slot() const { mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1); }

  // TMA reads keys after the last visible one as zeros, but not keys before the first. In tiles of v with such keys,
  // the warp waits for the copies and writes the zeros itself.
  __device__ __forceinline__ static bool has_edge(bool is_v, const AnyWork& work, int n) {
    return is_v && n * kBlockK < work.visible_begin;
  }
  __device__ __forceinline__ unsigned barrier_of_copies(bool has_edge) const {
    return has_edge ? smem.edge_full : full();
  }
  __device__ __forceinline__ void zero_edge(const AnyWork& work, int n) {
    mbarrier_wait(smem.edge_full, edge_parity);
    edge_parity ^= 1;
    zero_keys_before(work, n, target());
    if (is_leader) mbarrier_arrive(full());
  }
};

// Loads keys that lie one after the other.
template <class AnyWork, class Params>
struct RowProducer : VarlenProducer<AnyWork, Params> {
  using Base = VarlenProducer<AnyWork, Params>;
  using Base::Base, Base::params, Base::smem, Base::is_leader, Base::ring;

  __device__ __forceinline__ void run() {
    unsigned i = 0;
#pragma unroll 1
    for (;; ++i) {
      smem.wait_work(i);
      const AnyWork work = smem.work(i);
      if (!work.exists()) break;
      const DescendingTiles tiles = work.keys;
#pragma unroll 1
      for (int n = tiles.first(); tiles.has(n); n = tiles.next(n)) {
        this->request_work_at(n, i, tiles);
        const int before = kBlockSparse ? loaded.n() : n + 1;
        loaded.find_next(params, work, n == tiles.first());
        load<false>(work, kBlockSparse ? loaded.n() : n);
        if (kDecode) load_v(work, n);
        else if (n < tiles.end - 1) load_v(work, before);
        else if (kNextScoresFirst && i > 0) load_last_v(i - 1, before);
      }
      if (!kNextScoresFirst && !kDecode) load_v(work, kBlockSparse ? loaded.n() : work.keys.begin);
    }
    if (kNextScoresFirst && i > 0) load_last_v(i - 1, loaded.n());
  }

 private:
  LoadedTile loaded;

  __device__ __forceinline__ void load_v(const AnyWork& work, int n) {
    if constexpr (kPanelsV > 0) load<true>(work, n);
  }

  // Loads the v of a query block's last p v, which runs during the next query block.
  __device__ __forceinline__ void load_last_v(unsigned i, int last) {
    const AnyWork work = smem.work(i);
    load_v(work, kBlockSparse ? last : work.keys.begin);
  }

  template <bool kIsV>
  __device__ __forceinline__ void load(const AnyWork& work, int n) {
    constexpr int kPanels = kIsV ? kPanelsV : kPanelsQk;
    // Computed before the wait: nothing stands between the wait and the copy (L17).
    const VarlenMapRows rows = work.sequence(params.problem).visible_keys_from(n * kBlockK);
    const bool has_edge = this->has_edge(kIsV, work, n);
    const unsigned barrier = this->barrier_of_copies(has_edge);
    this->wait_slot();
    if (is_leader) {
      if constexpr (!kIsV) loaded.push(smem, ring.slot);
      mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytesK);
      load_panels<kPanels>(kIsV ? params.v_map : params.k_map, this->target(), kPanelBytesK, barrier,
                           boxed(rows, kBlockK, kIsV ? params.problem.head_dim_v : params.problem.head_dim),
                           work.kv_head);
    }
    __syncwarp();
    if (has_edge) this->zero_edge(work, n);
    ring.advance();
  }
};

static_assert(!kBlockSparse || !kPaged,
              "the two warps that load pages would each have to find the tiles that are visible");

// Loads keys that lie in pages: by cp.async if kCopies, otherwise by TMA. Two instances, since one for both takes too
// many registers.
template <class AnyWork, class Params, bool kCopies>
struct PageProducer : VarlenProducer<AnyWork, Params> {
  using Base = VarlenProducer<AnyWork, Params>;
  using Base::params, Base::smem, Base::is_leader, Base::ring;

  const bool loads_v;  // otherwise k

  // Two warps load, one k and one v: there are many small copies, and a warp issues one at a time.
  __device__ __forceinline__ PageProducer(const Params& p, const Addresses& addresses, int producer_idx)
      : Base(p, addresses), loads_v(producer_idx == 1) {}

  // One site issues all loads, as their code is long.
  __device__ __forceinline__ void run() {
    // The tile (and its work tile) whose v must still be loaded: o += p v follows the scores of the next tile.
    unsigned pending_work = kNone;
    int pending_tile = 0;
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      smem.wait_work(i);
      const bool exists = smem.work(i).exists();
      const DescendingTiles tiles = exists ? smem.work(i).keys : TileRange{0, 1};
      // One more iteration loads v of the last tile: after each work tile, or after all of them.
      const int last = tiles.begin - (exists && !kNextScoresFirst && !kDecode);
#pragma unroll 1
      for (int n = tiles.first(); n >= last; --n) {
        const bool has_k = exists && n >= tiles.begin;
        if (!loads_v && has_k) this->request_work_at(n, i, tiles);
#pragma unroll 1
        for (int operand = 0; operand < (kPanelsV > 0 ? 2 : 1); ++operand) {
          const bool is_v = operand == 1;
          const bool is_late = is_v && !kDecode;
          const unsigned of = is_late ? pending_work : has_k ? i : kNone;
          if (of == kNone) continue;
          if (is_v == loads_v) load(is_v, of, is_late ? pending_tile : n);
          ring.advance();
        }
        pending_work = has_k ? i : kNone, pending_tile = n;
      }
      if (kCopies && num_unpublished > 0) publish_all_but<0>();
      if (!exists) break;
    }
  }

 private:
  static constexpr unsigned kNone = ~0u;
  static constexpr int kNoPage = -1;
  static constexpr int kParts = (kBlockK + 31) / 32;
  using LanePages = int[kParts];
  static constexpr int kHeld = kCopies ? kDecode ? kParts : 0 : 1;  // more would take too many registers

  // The kHeld pages of the tile that probably comes next, as they arrive late from memory.
  unsigned held_work = kNone;
  int held_tile = 0;
  LanePages held;
  // Tiles copied by threads but not yet published: their number, and their slots, one byte each.
  int num_unpublished = 0;
  unsigned unpublished = 0;

  // Returns the page of a lane's key: the first key of its box (TMA), or key 32 part + lane (cp.async). kNoPage past
  // the last visible key.
  __device__ __forceinline__ int look_up(const AnyWork& work, int n, int part) const {
    const ProblemParams& problem = params.problem;
    const int lane = threadIdx.x % 32, row = kCopies ? 32 * part + lane : lane * params.page_box;
    const int key = n * kBlockK + row;
    if (row >= kBlockK || key >= work.visible_end) return kNoPage;
    return problem.page_table[work.number * problem.page_table_stride + page_of(params, key)];
  }
  __device__ __forceinline__ void look_up(const AnyWork& work, int n) {
#pragma unroll
    for (int part = 0; part < kHeld; ++part) held[part] = look_up(work, n, part);
  }

  // Loads k or v of tile n of work tile i into the ring.
  __device__ __forceinline__ void load(bool is_v, unsigned i, int n) {
    const AnyWork work = smem.work(i);
    LanePages pages;
    if constexpr (kHeld > 0) {
      if (held_work != i || held_tile != n) look_up(work, n);
#pragma unroll
      for (int part = 0; part < kHeld; ++part) pages[part] = held[part];
      held_work = i, held_tile = n - 1;
      if (n > work.keys.begin) look_up(work, n - 1);
    }
    if constexpr (kCopies) copy_keys(is_v, i, n, pages);
    else load_boxes(is_v, work, n, pages[0]);
  }

  __device__ __forceinline__ bool is_there(int page) const { return page >= 0 && page < params.problem.batch_k; }

  // Loads a tile by TMA. Each of the first lanes loads one box, whose keys lie in one page.
  __device__ __forceinline__ void load_boxes(bool is_v, const AnyWork& work, int n, int page) {
    const ProblemParams& problem = params.problem;
    const int rows = params.page_box, begin = threadIdx.x % 32 * rows, key = n * kBlockK + begin;
    const bool copies = begin < kBlockK;
    const bool lacks_some = __any_sync(0xffffffffu, copies && key < work.visible_end && !is_there(page));
    const int within = key - page_of(params, key) * problem.rows_k;
    const int end = is_there(page) ? const_min(within + work.visible_end - key, problem.rows_k) : 0;
    const VarlenBox box =
        boxed(VarlenMapRows{problem.rows_k, within, end, page}, rows, is_v ? problem.head_dim_v : problem.head_dim);
    const TensorMap& map = is_v ? params.v_map : params.k_map;
    const int panels = is_v ? kPanelsV : kPanelsQk;
    const bool has_edge = this->has_edge(is_v, work, n);
    const unsigned barrier = this->barrier_of_copies(has_edge), target = this->target() + begin * 128;
    this->wait_slot();
    if (!is_v) write_page_bits(params, smem, work, n, ring.slot, lacks_some);
    if (is_leader) mbarrier_arrive_expect_tx(barrier, panels * kPanelBytesK);
    __syncwarp();
    if (copies) {
#pragma unroll 1
      for (int panel = 0; panel < panels; ++panel) {
        load_box(target + panel * kPanelBytesK, map, barrier, panel * kPanelColumns, box, work.kv_head);
      }
    }
    __syncwarp();
    if (has_edge) this->zero_edge(work, n);
  }

  // Loads a tile by cp.async, where pages are no multiple of 8 keys. Eight threads copy a panel of a key.
  __device__ __forceinline__ void copy_keys(bool is_v, unsigned i, int n, const LanePages& pages) {
    constexpr int kUnrolled = kDecode ? 8 : 1;  // other kernels have too few registers
    const ProblemParams& problem = params.problem;
    const Operand& x = is_v ? params.v : params.k;
    const int lane = threadIdx.x % 32, columns = is_v ? problem.head_dim_v : problem.head_dim;
    const int panels = is_v ? kPanelsV : kPanelsQk;
    const AnyWork known = smem.work(i);
    bool is_absent = kHeld == 0;  // true also if the pages are not held
#pragma unroll
    for (int part = 0; part < kHeld; ++part) {
      const int row = 32 * part + lane;
      is_absent |= row < kBlockK && n * kBlockK + row < known.visible_end && !is_there(pages[part]);
    }
    const bool lacks_some = __any_sync(0xffffffffu, is_absent);
    const unsigned target = this->target();
    this->wait_slot();
    if (!is_v) write_page_bits(params, smem, known, n, ring.slot, lacks_some);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const AnyWork work = kDecode ? known : smem.work(i);  // read again with a fresh lane, to hold no registers (L5)
      const int lane = kDecode ? threadIdx.x % 32 : fresh_thread() % 32;
      const int key = n * kBlockK + 32 * part + lane;  // its row is null if it is read as zeros
      const int page = kHeld > 0 ? pages[part] : look_up(work, n, part);
      const bool is_visible = is_there(page) && !(is_v && key < work.visible_begin);
      const int within = key - page_of(params, key) * problem.rows_k;
      const char* const row = is_visible ? Place{page, 0}.address(x, 2, work.kv_head, within) : nullptr;
#pragma unroll kUnrolled
      for (int step = 0; step < 8 && 32 * part + 4 * step < kBlockK; ++step) {
        const char* const from = from_lane(row, 4 * step + lane / 8);
        const unsigned to = target + Swizzle<8>::offset(32 * part + 4 * step + lane / 8, lane % 8);
#pragma unroll
        for (int panel = 0; panel < panels; ++panel) {
          const int column = panel * kPanelColumns + lane % 8 * 8;
          cp_async_16_or_zeros(to + panel * kPanelBytesK, from + 2 * column, from != nullptr && column + 8 <= columns);
        }
      }
      // A chunk cut off by the last column replaces zeros, once their copies have completed.
      if (columns % 8 != 0) {
        const int column = columns / 8 * 8, chunk = column % kPanelColumns / 8;
        cp_async_commit();
        cp_async_wait<0>();
        __syncwarp();
        if (row != nullptr && 32 * part + lane < kBlockK) {
          const unsigned to =
              target + column / kPanelColumns * kPanelBytesK + Swizzle<8>::offset(32 * part + lane, chunk);
          cp_async_16_zfill(to, row + 2 * column, (columns - column) * 2);
        }
      }
    }
    cp_async_commit();
    // Tiles are published late, so that copies of several are under way. The number is bounded: consumers release a
    // slot only after the next two are published (the next one, if the warps split keys). With two warps, each loads
    // every second or third tile.
    constexpr int kNeeded = kWarpsSplitKeys ? 2 : 4, kMost = kPanelsV > 0 ? (kStages - kNeeded) / 2 : kStages - 3;
    constexpr int kAhead = kMost < 0 ? 0 : kMost < 3 ? kMost : 3;
    unpublished = unpublished << 8 | ring.slot, ++num_unpublished;
    if (num_unpublished > kAhead) publish_all_but<kAhead>();
  }

  // Returns the pointer of another lane.
  __device__ __forceinline__ static const char* from_lane(const char* pointer, int lane) {
    const auto bits = reinterpret_cast<unsigned long long>(pointer);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, bits, lane));
  }

  // Waits for all tiles copied by threads except the latest kPending, and publishes them to the consumers.
  template <int kPending>
  __device__ __forceinline__ void publish_all_but() {
    cp_async_wait<kPending>();
    fence_proxy_async();
    __syncwarp();
    for (; num_unpublished > kPending; --num_unpublished) {
      const unsigned slot = unpublished >> 8 * (num_unpublished - 1) & 255;
      if (is_leader) mbarrier_arrive(smem.kv_full + 8 * slot);
    }
  }
};

// The body of the warps that load keys: producer 0 and, with pages, producer 1.
template <class AnyWork, class Params>
__device__ __forceinline__ void produce_keys(const Params& params, const Addresses& smem, int producer_idx) {
  if constexpr (!kPaged) RowProducer<AnyWork, Params>(params, smem).run();
  else if (params.page_box > 0) PageProducer<AnyWork, Params, false>(params, smem, producer_idx).run();
  else PageProducer<AnyWork, Params, true>(params, smem, producer_idx).run();
}
