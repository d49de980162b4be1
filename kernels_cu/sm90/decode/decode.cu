// Forward on Hopper for few queries of each sequence: the rows of a query block are the query heads of a group. Thread
// blocks split the keys of a sequence.
//
//   s, p, o                     as in forward.cu, over the key tiles of a split
//   out = Σ w·o / Σ w·sum       over the splits, w = exp2(shift - largest shift): common/row_states.cuh
//
// Roles    As in forward.cu, with one consumer warpgroup; q is copied by cp.async.
// Splits   Their o, sums and shifts go to global memory. The thread block whose split ends last merges all in order.
// Barriers As in forward.cu for varlen, with one barrier `requested`, and kMerge instead of kIssue.
#include "../forward/mainloop.cuh"
#include "epilogue.cuh"
#include "roles.cuh"

struct DecodeConsumer : ForwardMainloop<DecodeConsumer> {
  using ForwardMainloop::ForwardMainloop;

  // One loop runs all key tiles, masked or not, one product at a time. Code is read from memory once a launch (L50),
  // and products wait for keys anyway. Results are bit-equal to ForwardMainloop::run.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (;;) {
      smem.wait_work(i);
      // The grid covers the largest possible number of work tiles.
      if (!smem.work(i).exists()) break;
      const TileRange tiles = smem.work(i).keys;
      wait_query();
      softmax.setup();
#pragma unroll 1
      for (int n = tiles.end - 1; n >= tiles.begin; --n) {
        const bool is_first = n == tiles.end - 1;
        const unsigned k_slot = issue_next_qk();
        wgmma_wait<0>(s);
        const bool changes_o = softmax_tile(n, k_slot);
        __syncwarp();  // all lanes have loaded q (see mbarrier_arrive_warp)
        release(k_slot);
        if (n == (kQInRegisters ? tiles.end - 1 : tiles.begin) && is_leader) mbarrier_arrive(smem.q_empty(i, group));
        pack();
        if (changes_o && !is_first) rescale();
        finish_pv(issue_next_pv(!is_first));
      }
      ++i;
      store(softmax);
    }
  }

  // Turns the scores of key tile n into weights. Returns true if o must be multiplied by o_scale.
  __device__ __forceinline__ bool softmax_tile(int n, unsigned k_slot) {
    const QueryWork work = smem.work(i);  // read here, so that it holds no registers before (L31)
    const auto rows = lane_queries(work);
    const TileMods tile_mods(params, work);
    const auto mod_tile = tile_mods.tile(rows, n * kBlockK);
    GroupKeys keys(params.problem, work, group);
    keys.find_unmasked(params.problem, work, group);
    Score{params.problem.score}.apply(s);
    tile_mods.apply(mod_tile, s, false);
    if (n >= keys.unmasked.end) mask(work).apply_end(s, rows, n * kBlockK, fresh_thread() % 4);
    if (n < keys.unmasked.begin) mask(work).apply_begin(s, rows, n * kBlockK, fresh_thread() % 4);
    missing_pages(k_slot).apply(s, fresh_thread() % 4);
    float sums[2];
    if constexpr (kAlwaysUpdatesMax) {
      softmax.update_max(s, scale_log2(), o_scale);
      softmax.exponentiate(s, scale_log2(), sums);
      softmax.add(sums);
      return true;
    }
    if (n == work.keys.end - 1) softmax.begin_with_few(rows, mask(work));
    softmax.update_max_if_unseen(s, scale_log2());
    softmax.exponentiate(s, scale_log2(), sums);
    if (!__any_sync(0xffffffffu, softmax.out_of_range(0, sums[0]) | softmax.out_of_range(1, sums[1]))) {
      softmax.add(sums);
      return false;
    }
    bool again[2];
    if (!softmax.scale_down(s, sums, again, o_scale)) {
      softmax.add(sums);
      return true;
    }
    auto finish = [&](float (&fresh)[8], int piece) {
      const int key = n * kBlockK + 16 * piece;
      Score{params.problem.score}.apply(fresh);
      tile_mods.apply(tile_mods.tile(rows, key), fresh, false);
      if (n >= keys.unmasked.end) mask(work).apply_end(fresh, rows, key, fresh_thread() % 4);
      if (n < keys.unmasked.begin) mask(work).apply_begin(fresh, rows, key, fresh_thread() % 4);
      missing_pages(k_slot).apply_piece(fresh, piece, fresh_thread() % 4);
    };
    recompute_tile_weights(s, softmax, sums, again, o_scale, finish, scale_log2(), q, q_smem(),
                           smem.kv + k_slot * kBytesSlot);
    return true;
  }

  // Calls visit(h, row of the block) for this lane's row in half h of the fragment, if it is one of these rows.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(Range rows, Visit visit) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = block_row() + fresh_thread() % 32 / 4 + 8 * h;
      if (row >= rows.begin && row < rows.end) visit(h, row);
    }
  }

  // Stores rows that belong to no other split.
  __device__ __forceinline__ void store_rows(const QueryWork& work, Range rows, const float (&lse)[2]) const {
    const int lane = fresh_thread() % 32;
    const DecodeOutput output{params};
    for_each_row(rows, [&](int h, int row) {
      const DecodeOutput::Row at = output.row(work, row);
      float scale = o_scale[h], row_lse = lse[h];
      output.count_sink(work, at, scale, row_lse);
      if (lane % 4 == 0) output.store_lse(work, at, row_lse);
      char* const out = output.out_row(work, at);
      if (out == nullptr) return;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        const int column = 8 * j + lane % 4 * 2;
        if (column >= params.problem.head_dim_v) break;
        const float a = o[4 * j + 2 * h] * scale, b = o[4 * j + 2 * h + 1] * scale;
        if constexpr (kOutBytes == 2) *reinterpret_cast<unsigned*>(out + 2 * column) = pack2(a, b);
        else *reinterpret_cast<float2*>(out + 4 * column) = {a, b};
      }
    });
  }

  // Stores the states of rows. A row with o_scale 0 has seen no key.
  __device__ __forceinline__ void store_split(const QueryWork& work, Range rows, const Softmax& softmax) const {
    const int lane = fresh_thread() % 32;
    const float sums[2] = {quad_sum(softmax.sum[0]), quad_sum(softmax.sum[1])};
    for_each_row(rows, [&](int h, int row) {
      const long long at = DecodeOutput{params}.partial_row(work, work.split, row);
      if (lane % 4 == 0) params.partial_sums[at] = {o_scale[h] == 0.0f ? 0.0f : sums[h], softmax.shift[h]};
      float* const out = params.partial_out + at * kHeadDimV + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        *reinterpret_cast<float2*>(out + 8 * j) = {o[4 * j + 2 * h], o[4 * j + 2 * h + 1]};
      }
    });
  }

  // Merges the splits of a query block. A thread takes kItems groups of four columns at a time, in kTogether splits.
  template <int kItems, int kTogether>
  __device__ __forceinline__ void merge(const QueryWork& work, int num_rows) const {
    const DecodeOutput output{params};
    const int chunks = params.problem.head_dim_v / 4, num_items = num_rows * chunks;
    const long long of_split = params.partial_rows, of_block = work.first_slot * of_split;
#pragma unroll 1
    for (int at = threadIdx.x % 128; at < num_items; at += 128 * kItems) {
      int row[kItems], column[kItems];
      MergedRow merged[kItems];
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        const int number = const_min(at + 128 * item, num_items - 1);  // some threads repeat the last item
        row[item] = fast_div(number, chunks), column[item] = (number - row[item] * chunks) * 4;
      }
#pragma unroll 1
      for (int split = 0; split < work.num_splits; split += kTogether) {
        float2 of[kItems][kTogether];
        float4 x[kItems][kTogether];
#pragma unroll
        for (int item = 0; item < kItems; ++item) {
          const long long first = of_block + split * of_split + row[item];
          const float* const y = params.partial_out + first * kHeadDimV + column[item];
#pragma unroll
          for (int n = 0; n < kTogether; ++n) {
            const bool exists = split + n < work.num_splits;
            of[item][n] = exists ? __ldcg(params.partial_sums + first + n * of_split) : float2{};
            x[item][n] = exists ? __ldcg(reinterpret_cast<const float4*>(y + n * of_split * kHeadDimV)) : float4{};
          }
        }
#pragma unroll
        for (int item = 0; item < kItems; ++item) merged[item].add(of[item], x[item]);
      }
#pragma unroll
      for (int item = 0; item < kItems; ++item) output.store(work, row[item], column[item], merged[item]);
    }
  }

  // Stores the rows of the previous work tile.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const QueryWork work = smem.work(i - 1);
    const DecodeOutput output{params};
    float lse[2];
    finish(work, softmax, o_scale, lse);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (o_scale[h] == 0.0f) zero_row(o, h);
    const int shared = output.shared_rows(work);
    if (work.split == 0) store_rows(work, {shared, output.num_rows(work)}, lse);
    store_split(work, {0, shared}, softmax);
    if (work.num_splits == 1 || !output.is_last_split(work)) return;
    // In either shape a thread has many loads in flight together, as their latency is long.
    if (work.num_splits <= 2) merge<4, 2>(work, shared);
    else merge<2, (kHeadDimV > 128 ? 4 : 8)>(work, shared);
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads, 1)
    CUFLASH_KERNEL(const __grid_constant__ KernelParams params) {
  run_decode<DecodeConsumer>(params);
}
