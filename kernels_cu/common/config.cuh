// The macros that the host gives to every kernel (Variant.constants), as typed constants. Each family's own config.cuh
// reads the macros that only its kernels get.
#pragma once

enum class DType { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

constexpr DType kDType = static_cast<DType>(CUFLASH_DTYPE);
constexpr DType kOutDType = static_cast<DType>(CUFLASH_OUT_DTYPE);
constexpr int kNumWarps = CUFLASH_WARPS;
constexpr int kSmemBytes = CUFLASH_SMEM_BYTES;      // dynamic shared memory of a block, as the host computes it
constexpr int kParamsBytes = CUFLASH_PARAMS_BYTES;  // size of the kernel's parameter struct, as the host packs it

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kElementBytes = kDType == DType::kFloat32 ? 4 : 2;
constexpr int kChunkElements = 16 / kElementBytes;  // elements of one 16-byte access

constexpr int kOutBytes = kOutDType == DType::kFloat32 ? 4 : 2;
static_assert(kOutDType == kDType || kOutDType == DType::kFloat32, "out has the input dtype or float32");

// Kernels that work on tiles.
#ifdef CUFLASH_HEAD_DIM
constexpr int kHeadDim = CUFLASH_HEAD_DIM;     // columns of q and k in shared memory; the caller's may be fewer
constexpr int kHeadDimV = CUFLASH_HEAD_DIM_V;  // columns of v and out that one block owns; 0 without v
constexpr int kBlockQ = CUFLASH_BLOCK_Q;       // queries of a tile
constexpr int kBlockK = CUFLASH_BLOCK_K;       // keys of a tile
constexpr int kStages = CUFLASH_STAGES;        // tiles that the ring in shared memory holds
static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0, "head dims are padded to multiples of 32");
static_assert(kBlockK % 16 == 0, "a key tile is whole 16-key steps");
#endif

// Whether sequences have variable lengths (common/varlen.cuh), which are then read from memory.
#ifdef CUFLASH_VARLEN
constexpr bool kVarlen = CUFLASH_VARLEN;
#else
constexpr bool kVarlen = false;
#endif

// Whether scores are capped. Some kernels are compiled for one answer, the others ask their parameters.
enum class Softcap { kNever, kAlways, kAtRunTime };
#ifdef CUFLASH_SOFTCAP
constexpr Softcap kSoftcap = CUFLASH_SOFTCAP ? Softcap::kAlways : Softcap::kNever;
#else
constexpr Softcap kSoftcap = Softcap::kAtRunTime;
#endif
#ifdef CUFLASH_SINGLE
constexpr bool kReadsAhead = true;  // lengths are read while kernels ahead may still write to them, and once more later
#else
constexpr bool kReadsAhead = false;
#endif

// score_mod, mask_mod, bias, sinks and dropout (mods), whose functions the text of the program holds (common/mods.cuh).
#ifdef CUFLASH_SCORE_MOD
constexpr bool kHasMods = true;
constexpr bool kScoreMod = CUFLASH_SCORE_MOD;                  // scores are made by a function, in powers of two
constexpr bool kScoreModMayMask = CUFLASH_SCORE_MOD_MAY_MASK;  // some of them may be -inf, as if a mask hid the key
constexpr bool kModsTogether = CUFLASH_MODS_TOGETHER;          // registers hold what all elements of a step load
constexpr bool kMaskMod = CUFLASH_MASK_MOD;                    // a function gives the visible keys
constexpr bool kScoreModGrad = CUFLASH_SCORE_MOD_GRAD;         // the derivative of score_mod is not 1
constexpr bool kSteepSlope = CUFLASH_SCORE_MOD_GRAD == 2;      // it or the score may be infinite, or NaN
constexpr bool kSinks = CUFLASH_SINKS;                         // each head has one more logit without a value
constexpr bool kDropout = CUFLASH_DROPOUT;                     // weights are dropped (common/dropout.cuh)
constexpr bool kBlockSparse = CUFLASH_BLOCK_SPARSE > 0;        // it is known which mask tiles of 64 x 64 are empty …
constexpr bool kSkipsFullTiles = CUFLASH_BLOCK_SPARSE > 1;     // … and which are full, of the whole mask
constexpr bool kShortOffsets = CUFLASH_SHORT_OFFSETS;          // offsets in captured arrays fit into an int
#else
constexpr bool kScoreModMayMask = false, kModsTogether = false;
constexpr bool kHasMods = false, kScoreMod = false, kMaskMod = false, kScoreModGrad = false, kSteepSlope = false;
constexpr bool kSinks = false, kDropout = false, kBlockSparse = false, kSkipsFullTiles = false, kShortOffsets = false;
#endif
// Whether the lists of blocks of variable-length sequences hold what mods need of a sequence (common/visible_rows.cuh).
#ifdef CUFLASH_LISTS_SEQLENS
constexpr bool kListsSeqlens = true;  // delta.cu before kernels with functions
#else
constexpr bool kListsSeqlens = kHasMods;
#endif
