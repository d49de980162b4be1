// Typed constants for the macros that every kernel gets (Variant.constants). The config.cuh of a kernel family reads
// the macros of that family.
#pragma once

enum class DType { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

constexpr DType kDType = static_cast<DType>(CUFLASH_DTYPE);
constexpr DType kOutDType = static_cast<DType>(CUFLASH_OUT_DTYPE);
constexpr int kNumWarps = CUFLASH_WARPS;
constexpr int kSmemBytes = CUFLASH_SMEM_BYTES;      // dynamic shared memory of a thread block, as the host computes it
constexpr int kParamsBytes = CUFLASH_PARAMS_BYTES;  // size of the kernel's parameter struct, as the host packs it

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kElementBytes = kDType == DType::kFloat32 ? 4 : 2;
constexpr int kChunkElements = 16 / kElementBytes;  // elements of one 16-byte access

constexpr int kOutBytes = kOutDType == DType::kFloat32 ? 4 : 2;
static_assert(kOutDType == kDType || kOutDType == DType::kFloat32, "out has the input dtype or float32");

// True if results are added to float32 arrays: out and lse to a state, gradients to sums.
#ifdef CUFLASH_ACCUMULATES
constexpr bool kAccumulates = true;
#else
constexpr bool kAccumulates = false;
#endif

// delta.cu only: true if delta is an array of the caller: an input in place of the row sums, or one more result.
#ifdef CUFLASH_TAKES_DELTA
constexpr bool kTakesDelta = true;
#else
constexpr bool kTakesDelta = false;
#endif
#ifdef CUFLASH_RETURNS_DELTA
constexpr bool kReturnsDelta = true;
#else
constexpr bool kReturnsDelta = false;
#endif

// Constants of kernels that work on tiles.
#ifdef CUFLASH_HEAD_DIM
constexpr int kHeadDim = CUFLASH_HEAD_DIM;     // columns of q and k in shared memory; the operand may have fewer
constexpr int kHeadDimV = CUFLASH_HEAD_DIM_V;  // columns of v and out that a thread block computes; 0 without v
constexpr int kBlockQ = CUFLASH_BLOCK_Q;       // queries of a tile
constexpr int kBlockK = CUFLASH_BLOCK_K;       // keys of a tile
constexpr int kStages = CUFLASH_STAGES;        // tiles in the shared-memory ring
static_assert(kHeadDim % 16 == 0 && kHeadDimV % 16 == 0, "head dims are padded to multiples of 16");
static_assert(kBlockK % 16 == 0, "a key tile is whole 16-key steps");
#endif

// True for variable-length sequences, whose lengths are read from device memory (common/varlen.cuh).
#ifdef CUFLASH_VARLEN
constexpr bool kVarlen = CUFLASH_VARLEN;
#else
constexpr bool kVarlen = false;
#endif

// Softcap of the scores: compiled out, compiled in, or chosen by a parameter.
enum class Softcap { kNever, kAlways, kAtRunTime };
#ifdef CUFLASH_SOFTCAP
constexpr Softcap kSoftcap = CUFLASH_SOFTCAP ? Softcap::kAlways : Softcap::kNever;
#else
constexpr Softcap kSoftcap = Softcap::kAtRunTime;
#endif
#ifdef CUFLASH_SINGLE
constexpr bool kReadsAhead = true;  // lengths are read before kernels ahead have ended, and again afterwards (L55)
#else
constexpr bool kReadsAhead = false;
#endif

// score_mod, mask_mod, bias, sinks and dropout (mods); the host prints their functions into the program
// (common/mods.cuh).
#ifdef CUFLASH_SCORE_MOD
constexpr bool kHasMods = true;
constexpr bool kScoreMod = CUFLASH_SCORE_MOD;                  // a function computes scores, in log2 units
constexpr bool kScoreModMayMask = CUFLASH_SCORE_MOD_MAY_MASK;  // the function may return -inf, which masks the key
constexpr bool kModsTogether = CUFLASH_MODS_TOGETHER;          // registers hold all loads of a step at once
constexpr bool kMaskMod = CUFLASH_MASK_MOD;                    // a function computes which keys are visible
constexpr bool kScoreModGrad = CUFLASH_SCORE_MOD_GRAD;         // the derivative of score_mod is not 1
constexpr bool kSteepSlope = CUFLASH_SCORE_MOD_GRAD == 2;      // the derivative or the score may be infinite or NaN
constexpr bool kSinks = CUFLASH_SINKS;                         // each head has one more logit, which has no value row
constexpr bool kDropout = CUFLASH_DROPOUT;                     // weights are dropped (common/dropout.cuh)
constexpr bool kBlockSparse = CUFLASH_BLOCK_SPARSE > 0;        // it is known which 64 x 64 mask tiles are empty …
constexpr bool kSkipsFullTiles = CUFLASH_BLOCK_SPARSE > 1;     // … and which are full under the whole mask
constexpr bool kShortOffsets = CUFLASH_SHORT_OFFSETS;          // offsets in captured arrays fit into an int
#else
constexpr bool kScoreModMayMask = false, kModsTogether = false;
constexpr bool kHasMods = false, kScoreMod = false, kMaskMod = false, kScoreModGrad = false, kSteepSlope = false;
constexpr bool kSinks = false, kDropout = false, kBlockSparse = false, kSkipsFullTiles = false, kShortOffsets = false;
#endif
// Index offsets of a call that is a part of a larger one. The printed functions add them; common/dropout.cuh says how
// keys at any offset take their bits.
enum class IndexOffsets { kNone, kAligned, kAny };
#ifdef CUFLASH_INDEX_OFFSETS
constexpr IndexOffsets kIndexOffsets = static_cast<IndexOffsets>(CUFLASH_INDEX_OFFSETS);
#else
constexpr IndexOffsets kIndexOffsets = IndexOffsets::kNone;
#endif

// True if the block lists of variable-length sequences include the sequence data that mods read
// (common/visible_rows.cuh).
#ifdef CUFLASH_LISTS_SEQLENS
constexpr bool kListsSeqlens = true;  // delta.cu, launched before kernels with mods
#else
constexpr bool kListsSeqlens = kHasMods;
#endif
