// Keys of sequences of several lengths in the ring of forward and lse on Hopper: those that lie in pages, and the first
// ones, which no query sees.
#pragma once
#include "forward_storage.cuh"

// The keys of a tile whose pages are not there, which nobody sees.
struct AbsentKeys {
  const KernelParams& params;
  const Addresses& smem;
  unsigned slot;  // of the ring

  // Their scores in the tile become -inf.
  template <int kCount>
  __device__ __forceinline__ void hide(float (&s)[kCount], int column_pair) const {
    if (!kLengths || params.problem.page_table == nullptr) return;
    unsigned present[4];
    ld_shared_v4(present, smem.present + 16 * slot);
    if ((present[0] & present[1] & present[2] & present[3]) == ~0u) return;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) hide_eight(s + 4 * j, present[j / 4], j % 4, column_pair);
  }

  // Those among 16 keys of the tile.
  __device__ __forceinline__ void hide_piece(float (&s)[8], int piece, int column_pair) const {
    if (!kLengths || params.problem.page_table == nullptr) return;
    const unsigned present = ld_shared_u32(smem.present + 16 * slot + 4 * (piece / 2));
#pragma unroll
    for (int j = 0; j < 2; ++j) hide_eight(s + 4 * j, present, piece % 2 * 2 + j, column_pair);
  }

 private:
  // `eighth` is the number of the eight keys among the 32 of the word.
  __device__ __forceinline__ static void hide_eight(float* s, unsigned present, int eighth, int column_pair) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool is_there = present >> (8 * eighth + 2 * column_pair + e) & 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) s[2 * half + e] = is_there ? s[2 * half + e] : -infinity();
    }
  }
};

// One warp loads key tile n of k or v, of so many columns, whose keys lie in pages, into a slot of the ring. Each lane
// copies one box, of keys of one page.
template <int kPanels>
__device__ __forceinline__ void load_from_pages(const KernelParams& params, const Addresses& smem, const TensorMap& map,
                                                int columns, int n, const RaggedQueryWork& work, unsigned barrier,
                                                const RingPosition& ring, bool leads) {
  const ProblemParams& problem = params.problem;
  const Pages pages{problem.page_table + work.number * problem.page_table_stride, problem.rows_k, problem.batch_k};
  const int lane = threadIdx.x % 32, rows = params.page_box, key = n * kBlockK + lane * rows;
  auto page_of = [&](int key) { return key < work.seen_end ? pages.table[key / pages.size] : pages.count; };
  const bool copies = lane * rows < kBlockK;
  // A page that is not there, or not needed, gives zeros.
  const int page = copies ? page_of(key) : 0;
  const bool is_there = pages.is_there(page);
  const bool lacks_some = __any_sync(0xffffffffu, copies && key < work.seen_end && !is_there);
  mbarrier_wait(smem.kv_empty + 8 * ring.slot, ring.parity ^ 1);
  uint4 present = {~0u, ~0u, ~0u, ~0u};
  if (lacks_some) {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = n * kBlockK + 32 * i + lane;
      words[i] = __ballot_sync(0xffffffffu, at >= work.seen_end || pages.has(at));
    }
    present = {words[0], words[1], words[2], words[3]};
  }
  if (leads) {
    st_shared_v4(smem.present + 16 * ring.slot, {present.x, present.y, present.z, present.w});
    mbarrier_arrive_expect_tx(barrier, kPanels * kPanelBytesK);
  }
  __syncwarp();
  if (!copies) return;
  const int first = key / pages.size * pages.size;  // key of the page
  const int end = is_there ? clamped(work.seen_end - first, pages.size) : 0;
  const RaggedMapRows from{pages.size, key - first, end, page};
  const unsigned target = smem.kv + ring.slot * kBytesSlot + lane * rows * 128;
  load_panels<kPanels>(map, target, kPanelBytesK, barrier, boxed(from, rows, columns), work.kv_head);
}

// Whether key tile n has keys before the first that is seen. TMA does not make zeros of them.
__device__ __forceinline__ bool has_hidden_before(const RaggedQueryWork& work, int n) {
  return n * kBlockK < work.seen_begin;
}

// One warp makes zeros of those keys in a tile of v, so that nothing is seen of what they hold.
template <int kPanels>
__device__ __forceinline__ void clear_hidden_before(const RaggedQueryWork& work, int n, unsigned tile) {
  const int chunks = smaller(work.seen_begin - n * kBlockK, kBlockK) * 8;  // of 16 bytes, in a panel
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    for (int i = threadIdx.x % 32; i < chunks; i += 32) st_shared_v4(tile + panel * kPanelBytesK + 16 * i, {0, 0, 0, 0});
  }
  fence_proxy_async();
  __syncwarp();
}

// Sequences that are all alike have no pages, and begin with the first key that is seen.
template <int kPanels>
__device__ __forceinline__ void load_from_pages(const KernelParams&, const Addresses&, const TensorMap&, int, int,
                                                const DenseQueryWork&, unsigned, const RingPosition&, bool) {}
__device__ constexpr bool has_hidden_before(const DenseQueryWork&, int) { return false; }
template <int kPanels>
__device__ __forceinline__ void clear_hidden_before(const DenseQueryWork&, int, unsigned) {}
