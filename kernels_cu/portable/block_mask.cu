// block_mask: classifies each mask tile of 64 queries x 64 keys under a mask_mod.
//
//   tile = 0 if none of its pairs is visible, 2 if all are, else 1; only existing queries and keys count
//
// cuflash/reference/block_mask.py does the same in NumPy. In a call that computes its own mask tiles, tiles that its
// other masks hide are not evaluated, and become 3 (common/mask_tiles.cuh).
//
// Roles    A warp owns a mask tile. It evaluates 8 queries at a time and stops once it has found visible and hidden
//          pairs. Lane l has query l / 4 of the 8, and 16 keys from key 16 (l % 4) on, as bits of a word.
#include "../common/mask_tiles.cuh"
#include "../common/mods.cuh"
#include "../common/varlen.cuh"

using Params = WithMods<BlockMaskParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

constexpr int kLanesOfQuery = 4, kQueriesTogether = 32 / kLanesOfQuery, kKeysOfLane = kMaskTile / kLanesOfQuery;

// Returns the kind of a mask tile. All lanes of a warp call together.
__device__ __forceinline__ MaskTileKind kind_of(const ModHead& mod_head, Range queries, Range keys) {
  const int lane = threadIdx.x % 32, key = keys.begin + lane % kLanesOfQuery * kKeysOfLane;
  const unsigned exist = (1u << clamped(keys.end - key, kKeysOfLane)) - 1;
  bool any_visible = false, any_hidden = false;
#pragma unroll 1
  for (int first = queries.begin; first < queries.end; first += kQueriesTogether) {
    const int query = first + lane / kLanesOfQuery;
    const ModHead::Row row = mod_head.row(query, key);
    unsigned visible = 0;
#pragma unroll
    for (int i = 0; i < kKeysOfLane; i += 2) {
      const ModHead::Pair pair = mod_head.pair(row, i);
      visible |= (mod_head.at(row, pair, 0.0f, i).visible | mod_head.at(row, pair, 0.0f, i + 1).visible << 1) << i;
    }
    const unsigned asked = query < queries.end ? exist : 0u;
    any_visible |= __any_sync(0xffffffffu, (visible & asked) != 0);
    any_hidden |= __any_sync(0xffffffffu, (~visible & asked) != 0);
    if (any_visible && any_hidden) return kPartialTile;
  }
  return any_visible ? kFullTile : kEmptyTile;
}

// True if some of the queries sees one of the keys; either range may be empty.
__device__ __forceinline__ bool shows_some(const Mask& mask, Range queries, Range keys) {
  const Range visible = mask.key_range(queries.begin, queries.end);
  return queries.begin < queries.end && const_max(visible.begin, keys.begin) < const_min(visible.end, keys.end);
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ Params params) {
  const BlockMaskParams& p = params;
  const unsigned num_warps = gridDim.x * kNumWarps;
#pragma unroll 1
  for (unsigned i = blockIdx.x * kNumWarps + threadIdx.x / 32; i < unsigned(p.num_mask_tiles); i += num_warps) {
    const unsigned row = i / unsigned(p.mask_tiles_k), head = row / unsigned(p.mask_tiles_q),
                   batch = head / unsigned(p.heads);
    const AnySequence sequence{p.problem, static_cast<int>(batch)};
    const int query = (row - head * p.mask_tiles_q) * kMaskTile, key = (i - row * p.mask_tiles_k) * kMaskTile;
    const Range queries{query, const_min(query + kMaskTile, sequence.seqlen_q())};
    const Range keys{key, const_min(key + kMaskTile, sequence.seqlen_k())};
    MaskTileKind kind = kHiddenTile;
    if (!p.of_call || shows_some(sequence.mask(), queries, keys)) {
      const ModHead mod_head(params, p.problem, batch, head - batch * p.heads, sequence.seqlen_q(),
                             sequence.seqlen_k());
      kind = kind_of(mod_head, queries, keys);
    }
    if (threadIdx.x % 32 == 0) p.mask_tiles[i] = kind;
  }
}
