// Backward (FlashAttention-2, arXiv 2307.08691, algorithm 2) for one block of keys of one kv head, over the queries of
// all its query heads: dk, dv, and this block's share of dq.
//
//   s = k qᵀ, dp = v doutᵀ      per tile of queries, transposed: rows are keys
//   p = exp(s - lse)            ds = p (dp - delta)            in registers
//   dv += p dout                dk += ds q
//   dq += dsᵀ k                 added to global memory in float32, in no fixed order; left out without kWithDq
// With splits, a kv head's query heads are shared out among blocks, and dk and dv are left to convert.cu to add up.
//
// Roles: kGroup warps share kWarpKeys keys. For s and dp each takes its kPieceQ queries of the tile; for dv and dk its
// columns (every kGroup-th block of 16). A group of one keeps p and ds in registers for dv and dk; larger groups hand
// them round in shared memory, as all do with ds for dq. For dq, warps own queries x columns. All threads copy.
// Barriers of a tile: (A) the tile is here and the last one is done with; (B) p and ds are written. With one stage, (C)
// q and dout are done with, before the next are fetched: a group of one is so at (B). With one buffer for p and ds, p
// is written and read before ds.
#include "../common/fragments.cuh"
#include "../common/mask.cuh"
#include "../common/scheduler.cuh"
#include "../ptx/red.cuh"
#include "gemm_ab.cuh"
#include "gradient.cuh"
#include "tile.cuh"
#include "weights.cuh"

struct SharedStorage {
  alignas(128) char k[kBlockK * kHeadDim * kElementBytes];
  alignas(128) char v[kBlockK * kHeadDimV * kElementBytes];
  alignas(128) char q[kStages][kBlockQ * kHeadDim * kElementBytes];
  alignas(128) char dout[kStages][kBlockQ * kHeadDimV * kElementBytes];
  alignas(128) char weights[kGroup > 1 && !kSharedWeights ? 2 : 1][kWeightBytes];  // ds, p
  alignas(128) float2 stats[kStages][kBlockQ];
};
static_assert(sizeof(SharedStorage) == kSmemBytes, "the host's formula for shared memory differs");
static_assert(sizeof(BackwardParams) == kParamsBytes, "the host packs other parameters");

constexpr int kTiles = kWarpKeys / 16;
constexpr int kPieces = kGroup == 1 ? kBlockQ / kPieceQ : 1;

// Warps over a tile of dq: kDqTiles fragments of 16 queries a warp, and as many columns as that leaves.
constexpr int kDqTiles =
    kBlockQ % 32 == 0 && kNumWarps % (kBlockQ / 32) == 0 && kHeadDim % (16 * kNumWarps / (kBlockQ / 32)) == 0 ? 2 : 1;
constexpr int kDqRowWarps = kBlockQ / (16 * kDqTiles);
constexpr int kDqColumnWarps = kNumWarps / kDqRowWarps;
static_assert(kNumWarps % kDqRowWarps == 0 && kHeadDim % (16 * kDqColumnWarps) == 0, "warps cover a tile of dq");
static_assert(kHeadDim % (16 * kGroup) == 0 && kHeadDimV % (16 * kGroup) == 0, "warps cover the columns");

using Scores = float[kTiles][kPieceQ / 2];

// What a warp owns: formed where it is used, as registers are short.
struct WarpRole {
  int key;     // its first, within the block
  int member;  // its place in the group

  __device__ __forceinline__ WarpRole() {
    const int warp = fresh_thread() / 32;
    key = warp / kGroup * kWarpKeys;
    member = warp % kGroup;
  }
};

// s and dp become p and ds; `stats` are those of the piece.
template <bool kPlain>
__device__ __forceinline__ void weigh_piece(Scores& s, Scores& dp, const BackwardParams& params, unsigned stats) {
  const int lane = fresh_thread() % 32;
#pragma unroll
  for (int j = 0; j < kPieceQ / 8; ++j) {
    const float4 x = ld_shared_v4_f32(stats + (8 * j + lane % 4 * 2) * 8);  // of two queries
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        weigh<kPlain>(s[m][i], dp[m][i], params, x.x, x.y);
        weigh<kPlain>(s[m][i + 1], dp[m][i + 1], params, x.z, x.w);
      }
    }
  }
}

// The same, with softcap and mask where there are any; `key` and `query` are the first of the piece.
__device__ __forceinline__ void compute_weights(Scores& s, Scores& dp, const BackwardParams& params, const Mask& mask,
                                                unsigned stats, int key, int query) {
  const KeyRange full = mask.full_range(key, key + kWarpKeys);
  const bool visible = query >= full.begin && query + kPieceQ <= full.end && key + kWarpKeys <= params.seqlen_k;
  if (visible && params.softcap_scale == 0.0f) {
    weigh_piece<true>(s, dp, params, stats);
    return;
  }
  if (params.softcap_scale != 0.0f) cap(s, params.softcap_scale);
  const int lane = fresh_thread() % 32;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) mask.apply<true>(s[m], key + 16 * m + lane / 4, query, lane % 4);
  weigh_piece<false>(s, dp, params, stats);
}

// A lane's part of a fragment, added to an accumulator.
__device__ __forceinline__ void add_fragment(float* gmem, int lane, const float* x) {
  if constexpr (kFragmentByLane) {
    red_add_v4_f32(gmem + fragment_index(lane, 0), x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add_f32(gmem + fragment_index(lane, i), x[i]);
  }
}

// This warp's share of dsᵀ k, added to the accumulator of dq from row `row` of the head on.
__device__ __forceinline__ void add_dq(const BackwardParams& params, unsigned ds_smem, unsigned k_smem, int batch,
                                       int head, int row) {
  const int thread = fresh_thread(), lane = thread % 32;
  const int row_warp = thread / 32 / kDqColumnWarps, column_warp = thread / 32 % kDqColumnWarps;
  constexpr int kColumns = kHeadDim / kDqColumnWarps;
  constexpr int kPass = !kIsTf32 ? kColumns : kColumns % 32 == 0 ? 32 : 16;  // columns at a time, for want of registers
#pragma unroll 1
  for (int pass = 0; pass < kColumns / kPass; ++pass) {
    const int block = pass * (kPass / 16) * kDqColumnWarps + column_warp;  // the first of 16 columns
    float dq[kDqTiles][kPass / 2] = {};
    gemm_ab<QSwizzle, kBlockK, 16 * kDqColumnWarps>(dq, QueryRows(ds_smem, 16 * kDqTiles * row_warp), k_smem,
                                                    16 * block);
#pragma unroll
    for (int m = 0; m < kDqTiles; ++m) {
      const int row_tile = row / 16 + row_warp * kDqTiles + m;
      if (row_tile * 16 >= params.seqlen_q) continue;
      float* const target = fragment_tile(params.dq_acc, static_cast<long long>(batch) * params.heads_q + head,
                                          params.seqlen_q, row_tile, kHeadDim) +
                            block * kFragmentBlock;
#pragma unroll
      for (int j = 0; j < kPass / 8; ++j) {
        add_fragment(target + (j / 2 * kDqColumnWarps * 2 + j % 2) * kFragmentFloats, lane, &dq[m][4 * j]);
      }
    }
  }
}

// A warp's accumulator of dk or dv into that of its split.
template <int kColumns, int kCount>
__device__ __forceinline__ void store_split(float* acc, const BackwardParams& params, const KeyBlock& block,
                                            const float (&x)[kTiles][kCount], const WarpRole& role) {
  const int lane = threadIdx.x % 32;
  const long long head =
      (block.batch * (params.heads_q / params.heads_per_kv) + block.kv_head) * static_cast<long long>(params.splits) +
      block.split;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int row_tile = (block.key_begin + role.key) / 16 + m;
    if (row_tile * 16 >= params.seqlen_k) continue;
    float* const target = fragment_tile(acc, head, params.seqlen_k, row_tile, kColumns) + role.member * kFragmentBlock;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float* const fragment = target + (j / 2 * kGroup * 2 + j % 2) * kFragmentFloats;
#pragma unroll
      for (int i = 0; i < 4; ++i) fragment[fragment_index(lane, i)] = x[m][4 * j + i];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNumThreads, kBlocksPerSm)
    CUFLASH_KERNEL(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(128) char smem_bytes[];
  const SharedStorage& storage = *reinterpret_cast<const SharedStorage*>(smem_bytes);
  const unsigned k_smem = smem_address(storage.k), v_smem = smem_address(storage.v);
  const unsigned ds_smem = smem_address(storage.weights[0]);
  const unsigned p_smem = smem_address(storage.weights[sizeof(storage.weights) / kWeightBytes - 1]);

  const Mask mask = Mask(params).transposed();
  const KeyBlock block(params);
  const KeyRange queries = mask.key_range(block.key_begin, block.key_end);
  const int m_begin = queries.begin / kBlockQ;
  const int m_end = queries.begin < queries.end ? (queries.end + kBlockQ - 1) / kBlockQ : m_begin;

  auto fetch = [&](int head, int m, int slot) {
    const TileLoader<kBlockQ, kHeadDim> q_loader(params.q, block.batch, head, 0, params.head_dim, params.aligned & 1);
    const TileLoader<kBlockQ, kHeadDimV> dout_loader(params.dout, block.batch, head, 0, params.head_dim_v,
                                                     params.aligned & 8);
    const int row = m * kBlockQ, thread = fresh_thread();
    q_loader.load(smem_address(storage.q[slot]), row, params.row_begin, params.row_end);
    dout_loader.load(smem_address(storage.dout[slot]), row, params.row_begin, params.row_end);
    if (thread < kBlockQ / 2) {
      cp_async_16(smem_address(storage.stats[slot]) + thread * 16,
                  stats_of(params, block.batch, head) + row + 2 * thread);
    }
  };
  // All tiles of one head, then those of the next of the group.
  auto fetch_next = [&](int head, int m, int slot) {
    if (m + 1 < m_end) {
      fetch(head, m + 1, slot);
    } else if (head + 1 < block.head_end) {
      fetch(head + 1, m_begin, slot);
    }
    cp_async_commit();
  };

  float dk[kTiles][kHeadDim / kGroup / 2] = {}, dv[kTiles][kHeadDimV / kGroup / 2] = {};
  {
    const TileLoader<kBlockK, kHeadDim> k_loader(params.k, block.batch, block.kv_head, 0, params.head_dim,
                                                 params.aligned & 2);
    const TileLoader<kBlockK, kHeadDimV> v_loader(params.v, block.batch, block.kv_head, 0, params.head_dim_v,
                                                  params.aligned & 4);
    k_loader.load(k_smem, block.key_begin, params.key_begin, params.key_end);
    v_loader.load(v_smem, block.key_begin, params.key_begin, params.key_end);
  }
  if (m_begin < m_end) fetch(block.head_begin, m_begin, 0);
  cp_async_commit();

  int slot = 0;
#pragma unroll 1
  for (int head = block.head_begin; head < block.head_end; ++head) {
#pragma unroll 1
    for (int m = m_begin; m < m_end; ++m) {
      cp_async_wait<0>();
      __syncthreads();  // (A)
      if constexpr (kStages == 2) fetch_next(head, m, slot ^ 1);
      const unsigned q_smem = smem_address(storage.q[slot]), dout_smem = smem_address(storage.dout[slot]);

#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        const WarpRole role;
        const int query = (kGroup > 1 ? role.member : piece) * kPieceQ;
        Scores s = {}, dp = {};
        gemm_abt<QSwizzle, kHeadDim / kStepElements>(s, Rows<QSwizzle>(k_smem, role.key),
                                                     b_lane_address<QSwizzle>(q_smem) + query * QSwizzle::kRowBytes);
        gemm_abt<VSwizzle, kHeadDimV / kStepElements>(
            dp, Rows<VSwizzle>(v_smem, role.key), b_lane_address<VSwizzle>(dout_smem) + query * VSwizzle::kRowBytes);
        compute_weights(s, dp, params, mask, smem_address(storage.stats[slot]) + query * 8, block.key_begin + role.key,
                        m * kBlockQ + query);
        if constexpr (kGroup > 1) {
          store_fragments<WeightSwizzle, 16>(p_smem, s, role.key, query);
          if constexpr (kSharedWeights) {
            __syncthreads();
            gemm_ab<VSwizzle, kBlockQ, 16 * kGroup>(dv, KeyRows(p_smem, role.key), dout_smem, 16 * role.member);
            __syncthreads();
          }
        }
        if constexpr (kGroup > 1 || kWithDq) store_fragments<WeightSwizzle, 16>(ds_smem, dp, role.key, query);
        if constexpr (kGroup == 1) {
          gemm_weights<VSwizzle>(dv, s, dout_smem + query * VSwizzle::kRowBytes);
          gemm_weights<QSwizzle>(dk, dp, q_smem + query * QSwizzle::kRowBytes);
        }
      }
      if constexpr (kGroup > 1 || kWithDq || kStages == 1) __syncthreads();  // (B)
      if constexpr (kGroup > 1) {
        const WarpRole role;
        if constexpr (!kSharedWeights) {
          gemm_ab<VSwizzle, kBlockQ, 16 * kGroup>(dv, KeyRows(p_smem, role.key), dout_smem, 16 * role.member);
        }
        gemm_ab<QSwizzle, kBlockQ, 16 * kGroup>(dk, KeyRows(ds_smem, role.key), q_smem, 16 * role.member);
        if constexpr (kStages == 1) __syncthreads();  // (C)
      }
      if constexpr (kStages == 1) fetch_next(head, m, 0);
      if constexpr (kWithDq) add_dq(params, ds_smem, k_smem, block.batch, head, m * kBlockQ);
      if constexpr (kStages == 2) slot ^= 1;
    }
  }
  cp_async_wait<0>();  // k and v may still be under way when no query sees the block
  __syncthreads();
  const WarpRole role;
  const KeyBlock same(params);
  if (params.dk_acc != nullptr) {
    store_split<kHeadDim>(params.dk_acc, params, same, dk, role);
    store_split<kHeadDimV>(params.dv_acc, params, same, dv, role);
    return;
  }
  // Into the tiles that k and v leave.
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) scale_row(dk[r / 2], r % 2, params.softmax_scale);
  store_fragments<QSwizzle, 16 * kGroup>(k_smem, dk, role.key, 16 * role.member);
  store_fragments<VSwizzle, 16 * kGroup>(v_smem, dv, role.key, 16 * role.member);
  __syncthreads();
  store_tile<kBlockK, kHeadDim>(params.dk, same.batch, same.kv_head, k_smem, same.key_begin, same.key_end,
                                params.key_begin, params.key_end, params.head_dim, params.aligned & 64);
  store_tile<kBlockK, kHeadDimV>(params.dv, same.batch, same.kv_head, v_smem, same.key_begin, same.key_end,
                                 params.key_begin, params.key_end, params.head_dim_v, params.aligned & 128);
}
