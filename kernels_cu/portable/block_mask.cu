// block_mask: which cells of 64 queries x 64 keys a mask of the caller's own shows nothing of, shows in part, or whole.
//
//   cell = 0 if none of its pairs is visible, 2 if all are, else 1; only pairs of queries and keys that exist count
//
// cuflash/reference/block_mask.py is the same in NumPy. Where a call makes cells for itself, those that its other masks
// hide are not asked for, and get 3 (common/cells.cuh).
//
// Roles    A warp owns a cell. It looks at 8 queries at a time, until it has found both kinds of pairs. Lane l has
//          query l / 4 of them, and 16 keys from key 16 (l % 4) on, as bits of a word.
#include "../common/cells.cuh"
#include "../common/own_scores.cuh"
#include "../common/varlen.cuh"

using Params = WithOwn<BlockMaskParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

constexpr int kLanesOfQuery = 4, kQueriesTogether = 32 / kLanesOfQuery, kKeysOfLane = kCell / kLanesOfQuery;

// What a mask shows of a cell. All lanes of a warp ask together.
__device__ __forceinline__ MaskTileKind kind_of(const ModHead& own, Range queries, Range keys) {
  const int lane = threadIdx.x % 32, key = keys.begin + lane % kLanesOfQuery * kKeysOfLane;
  const unsigned exist = (1u << clamped(keys.end - key, kKeysOfLane)) - 1;
  bool some_seen = false, some_hidden = false;
#pragma unroll 1
  for (int first = queries.begin; first < queries.end; first += kQueriesTogether) {
    const int query = first + lane / kLanesOfQuery;
    const ModHead::Row row = own.row(query, key);
    unsigned visible = 0;
#pragma unroll
    for (int i = 0; i < kKeysOfLane; i += 2) {
      const ModHead::Pair pair = own.pair(row, i);
      visible |= (own.at(row, pair, 0.0f, i).visible | own.at(row, pair, 0.0f, i + 1).visible << 1) << i;
    }
    const unsigned asked = query < queries.end ? exist : 0u;
    some_seen |= __any_sync(0xffffffffu, (visible & asked) != 0);
    some_hidden |= __any_sync(0xffffffffu, (~visible & asked) != 0);
    if (some_seen && some_hidden) return kPartialCell;
  }
  return some_seen ? kFullCell : kEmptyCell;
}

// Whether some of the queries sees one of the keys, of which there may be none.
__device__ __forceinline__ bool shows_some(const Mask& mask, Range queries, Range keys) {
  const Range seen = mask.key_range(queries.begin, queries.end);
  return queries.begin < queries.end && const_max(seen.begin, keys.begin) < const_min(seen.end, keys.end);
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ Params params) {
  const BlockMaskParams& p = params;
  const unsigned num_warps = gridDim.x * kNumWarps;
#pragma unroll 1
  for (unsigned i = blockIdx.x * kNumWarps + threadIdx.x / 32; i < unsigned(p.num_cells); i += num_warps) {
    const unsigned row = i / unsigned(p.cells_k), head = row / unsigned(p.cells_q), batch = head / unsigned(p.heads);
    const AnySequence sequence{p.problem, static_cast<int>(batch)};
    const int query = (row - head * p.cells_q) * kCell, key = (i - row * p.cells_k) * kCell;
    const Range queries{query, const_min(query + kCell, sequence.seqlen_q())};
    const Range keys{key, const_min(key + kCell, sequence.seqlen_k())};
    MaskTileKind kind = kNotAskedCell;
    if (!p.of_call || shows_some(sequence.mask(), queries, keys)) {
      const ModHead own(params, p.problem, batch, head - batch * p.heads, sequence.seqlen_q(), sequence.seqlen_k());
      kind = kind_of(own, queries, keys);
    }
    if (threadIdx.x % 32 == 0) p.cells[i] = kind;
  }
}
