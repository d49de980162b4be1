// Decoding: forward for few queries per sequence. The query heads of a group are rows of one thread block. Thread
// blocks (splits) divide the keys of a sequence, and warps divide the keys of each tile.
//
//   s, p, o                        as in forward.cu, for all rows of the thread block with a warp's keys
//   o = Σ w o, sum = Σ w sum       over the warps, then over the splits; out = o / sum: common/row_states.cuh
//
// Roles    Every warp has all rows, and a quarter of the keys of each tile. All threads copy.
// Ring     kStages tiles of k and of v, filled by cp.async: the next tile is fetched while this one is computed.
// Barriers of the thread block, for each tile:
//          (A)  k and v of the tile have arrived, and every warp is done with the previous tile
#include "../common/mask.cuh"
#include "../common/mods.cuh"
#include "../common/row_states.cuh"
#include "../common/score.cuh"
#include "../common/tile_range.cuh"
#include "../ptx/atomic.cuh"
#include "gemm_ab.cuh"
#include "softmax_flash2.cuh"
#include "tile.cuh"
#include "tile_scheduler.cuh"

constexpr int kWarpKeys = kBlockK / kStateWarps, kScores = kWarpKeys / 2;  // per warp and tile
static_assert(kNumWarps == kStateWarps && kBlockQ == kStateRows && kStages == 2 && kVarlen, "");

struct Tiles {
  alignas(128) char k[kStages][kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kStages][kBlockK * kHeadDimV * kElementBytes];
};
struct SharedStorage {
  alignas(128) char q[kBlockQ * kHeadDim * kElementBytes];
  union {
    Tiles tiles;
    alignas(128) char states[kStateBytes];  // after the last tile
  };
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
using Params = WithMods<SplitParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

// Rows and keys of a thread block: row r is query r / heads of head r % heads, among consecutive heads.
struct Found {
  RowSlots row_slots;
  VarlenSequence sequence;
  Range queries;                               // the used queries
  int written_end;                             // end of its queries, used or not
  int kv_head, first_head, heads, heads_here;  // heads: rows per query; heads_here: existing heads among them
  int block, split, num_splits;
  TileRange tiles;

  __device__ Found(const SplitParams& p, HeadBlock)
      : row_slots(RowSlots::of_slot(axis_of_queries(p.problem), slot(p), p.queries)),
        sequence(p.problem, row_slots.sequence) {
    if (sequence.seqlen_q() == 0) sequence.q_place.begin = row_slots.begin;
    const int group = p.problem.heads_per_kv, index = blockIdx.x;
    kv_head = index % p.heads_kv;
    const int part = index / p.heads_kv % p.head_parts;
    split = index / (p.heads_kv * p.head_parts) % p.splits;
    block = (slot(p) * p.head_parts + part) * p.heads_kv + kv_head;
    heads = min(group, kBlockQ), heads_here = min(group - part * kBlockQ, kBlockQ);
    first_head = kv_head * group + part * kBlockQ;
    queries.begin = row_slots.row(slot(p), p.queries);
    queries.end = const_min(queries.begin + p.queries, sequence.seqlen_q());
    written_end = const_min(queries.begin + p.queries, row_slots.num_rows());
    const bool sees = queries.begin < queries.end;
    tiles = TileRange::covering(sees ? sequence.mask().key_range(queries.begin, queries.end) : Range{0, 0}, kBlockK);
    // Chosen on the device, where lengths are known: at most one split per kLeast key tiles, rounded up.
    constexpr int kLeast = 4;
    const int count = tiles.count(), most = max(min(p.splits, (count + kLeast - 1) / kLeast), 1);
    const int each = max((count + most - 1) / most, 1);
    num_splits = max((count + each - 1) / each, 1);
    tiles.begin += split * each, tiles.end = const_min(tiles.end, tiles.begin + each);
  }

  // Thread block indices count kv heads fastest, then parts of a group's heads, splits, and slots of queries.
  __device__ static int slot(const SplitParams& p) { return blockIdx.x / (p.heads_kv * p.head_parts * p.splits); }

  __device__ int query_of(int row) const { return queries.begin + row / heads; }

  // Returns the functions of a row's head. Sequence and head are clamped to existing ones: results of unused rows are
  // not used, but mods may load by these indices.
  __device__ __forceinline__ ModHead make_mod_head(const Params& p, int row) const {
    const int head = first_head + const_min(row % heads, heads_here - 1);
    return {p, p.problem, const_max(row_slots.sequence, 0), head, sequence.seqlen_q(), sequence.seqlen_k()};
  }
};

// The rows of a thread block as RowStates takes them.
struct BlockRows {
  const Params& params;
  const Found& at;
  const int num_rows = (at.written_end - at.queries.begin) * at.heads, shared_rows = at.num_splits > 1 ? num_rows : 0;
  const int split = at.split, num_splits = at.num_splits;

  __device__ __forceinline__ static void sync() { __syncthreads(); }
  __device__ __forceinline__ float* partial_out() const { return params.partial_out; }
  __device__ __forceinline__ float2* partial_sums() const { return params.partial_sums; }
  __device__ __forceinline__ long long partial_row(int of, int row) const {
    return (static_cast<long long>(at.block) * params.splits + of) * kBlockQ + row;
  }
  __device__ __forceinline__ bool is_last_split() const {
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {  // one arrival for all threads: their stores precede the barrier
      is_last = atomic_add_acq_rel(params.arrivals + at.block, 1) == num_splits - 1;
      if (is_last) params.arrivals[at.block] = 0;  // zero for the next launch
    }
    return __syncthreads_or(is_last);
  }
  __device__ __forceinline__ void store(int row, int column, const MergedRow& merged) const {
    const int query = at.query_of(row), head = row % at.heads;
    if (head >= at.heads_here) return;
    const VarlenSequence& sequence = at.sequence;
    float o_scale = 0.0f;  // used only with a sink
    if (kSinks || (column == 0 && params.lse != nullptr)) {
      float lse = merged.sum == 0.0f ? -infinity() : merged.shift * kLn2 + logf(merged.sum);
      if constexpr (kSinks) {
        o_scale = merged.scale();
        if (query < at.queries.end) Sink(params, at.first_head + head).add(o_scale, lse);
      }
      if (column == 0 && params.lse != nullptr) params.lse[sequence.lse_offset(at.first_head + head) + query] = lse;
    }
    const int count = params.problem.head_dim_v - column;
    if (count <= 0 || (query >= at.queries.end && !params.problem.zero_unused_rows)) return;
    char* const out = sequence.queries().address(params.out, kOutBytes, at.first_head + head, query, column);
    const float4 x = kSinks ? merged.out(o_scale) : merged.out();
    const float values[4] = {x.x, x.y, x.z, x.w};
    if (params.out.aligned && count >= 4) {
      if constexpr (kOutBytes == 2) *reinterpret_cast<uint2*>(out) = {pack2(x.x, x.y), pack2(x.z, x.w)};
      else *reinterpret_cast<float4*>(out) = x;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count) break;
      if constexpr (kOutBytes == 4) reinterpret_cast<float*>(out)[i] = values[i];
      else reinterpret_cast<unsigned short*>(out)[i] = static_cast<unsigned short>(pack2(values[i], 0.0f));
    }
  }
};

// Loads the rows of q; unused rows become zeros.
__device__ __forceinline__ void load_queries(const Params& params, const Found& at, unsigned q_smem) {
  constexpr int kChunks = kHeadDim / kChunkElements;
#pragma unroll 1
  for (int i = threadIdx.x; i < kBlockQ * kChunks; i += kNumThreads) {
    const int row = i / kChunks, column = i % kChunks * kChunkElements, head = row % at.heads, query = at.query_of(row);
    const bool is_used = query < at.queries.end && head < at.heads_here;
    Chunk<kDType> chunk = {};
    if (is_used) {
      const char* const from = at.sequence.queries().address(params.q, kElementBytes, at.first_head + head, query);
      chunk = load_chunk<kDType>(from, column, params.problem.head_dim - column, params.q.aligned);
    }
    st_shared_v4(q_smem + Swizzle<kChunks>::offset(row, i % kChunks), chunk.words);
  }
}

// Replaces the products of a warp's keys, from `key` on, by scores, or by -inf if masked. `mod_heads` are the mods of
// the lane's two rows.
__device__ __forceinline__ void score_and_mask(const Params& params, const Found& at, const TwoModHeads& mod_heads,
                                               float (&s)[kScores], int key) {
  Score{params.problem.score}.apply(s);
  const int lane = fresh_thread() % 32;
  const AnyLaneQueries rows{at.query_of(lane / 4), at.query_of(lane / 4 + 8)};
  apply_mods(mod_heads, s, ModRows(mod_heads, rows, key, lane % 4));
  const Mask& mask = at.sequence.mask();
  const Range common = mask.full_range(at.queries.begin, at.queries.end);
  if (key + kWarpKeys > common.end) mask.apply_end(s, rows, key, lane % 4);
  if (key < common.begin) mask.apply_begin(s, rows, key, lane % 4);
  const PagedPlace& keys = at.sequence.k_place;
  const Range range{key, const_min(key + kWarpKeys, at.sequence.seqlen_k())};
  if (!keys.is_paged() || !keys.pages.lacks_some(range)) return;
#pragma unroll
  for (int j = 0; j < kWarpKeys / 4; ++j) {
    const int one = key + j / 2 * 8 + lane % 4 * 2 + j % 2;
    if (one < range.end && !keys.pages.has(one)) s[j / 2 * 4 + j % 2] = s[j / 2 * 4 + 2 + j % 2] = -infinity();
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned q_smem = smem_address(storage.q), k_smem = smem_address(storage.tiles.k);
  const unsigned v_smem = smem_address(storage.tiles.v);
  constexpr unsigned kBytesK = sizeof(Tiles::k[0]), kBytesV = sizeof(Tiles::v[0]);
  const int warp = threadIdx.x / 32;

  const Found& at = shared_by_block<Found>(params, HeadBlock{});
  if (at.queries.begin >= at.written_end || at.split >= at.num_splits) return;
  const VarlenSequence& sequence = at.sequence;
  const TileLoader<kBlockK, kHeadDim, KeyPlaceInMemory> k_loader(params.k, sequence.keys(), at.kv_head,
                                                                 params.problem.head_dim);
  const TileLoader<kBlockK, kHeadDimV, KeyPlaceInMemory> v_loader(params.v, sequence.keys(), at.kv_head,
                                                                  params.problem.head_dim_v);
  const AscendingTiles tiles = at.tiles;
  const int lane_row = threadIdx.x % 32 / 4;
  const TwoModHeads mod_heads{at.make_mod_head(params, lane_row), at.make_mod_head(params, lane_row + 8)};
  auto fetch = [&](int n, int slot) {
    if (!tiles.has(n)) return;
    k_loader.load(k_smem + slot * kBytesK, n * kBlockK, sequence.visible_keys());
    v_loader.load(v_smem + slot * kBytesV, n * kBlockK, sequence.visible_keys());
  };

  float o[1][kHeadDimV / 2] = {};
  SoftmaxFlash2<1, kScores> softmax;
  softmax.setup();
  load_queries(params, at, q_smem);
  fetch(tiles.first(), 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (int n = tiles.first(); tiles.has(n); n = tiles.next(n), slot ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // (A)
    fetch(tiles.next(n), slot ^ 1);
    cp_async_commit();

    float s[1][kScores] = {};
    const Rows<QSwizzle> q(q_smem, 0);
    gemm_abt<QSwizzle, kHeadDim / kStepElements>(
        s, [&](FragmentA(&a)[1], int kk) { q(a, kk); },
        b_lane_address<QSwizzle>(k_smem + slot * kBytesK + warp * kWarpKeys * QSwizzle::kRowBytes));
    score_and_mask(params, at, mod_heads, s[0], n * kBlockK + warp * kWarpKeys);
    float o_scale[2];
    if (softmax.update(s, scale_log2_of(params.problem), o_scale)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale_row(o[0], h, o_scale[h]);
    }
    gemm_weights<VSwizzle>(o, s, v_smem + slot * kBytesV + warp * kWarpKeys * VSwizzle::kRowBytes);
  }
  cp_async_wait<0>();
  __syncthreads();  // the states reuse the memory of the tiles

  const BlockRows rows{params, at};
  const RowStates<BlockRows> states{rows, smem_address(storage.states)};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = quad_sum(softmax.sum[h]);
    const bool is_used = at.query_of(threadIdx.x % 32 / 4 + 8 * h) < at.queries.end;
    states.put(warp, h, o[0], is_used ? sum : 0.0f, softmax.max_log2[h]);
  }
  __syncthreads();
  states.store();
}
