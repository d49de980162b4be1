// The only reader of -D macros (cuflash/variant.py, Variant.constants): typed constants and static checks.
#pragma once

enum class DType { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };
enum class Algorithm { kFlash1 = 1, kFlash2 = 2, kFlashD = 3 };

constexpr DType kDType = static_cast<DType>(CUFLASH_DTYPE);
constexpr DType kOutDType = static_cast<DType>(CUFLASH_OUT_DTYPE);
constexpr Algorithm kAlgorithm = static_cast<Algorithm>(CUFLASH_ALGORITHM);
constexpr int kNumWarps = CUFLASH_WARPS;
constexpr int kSmemBytes = CUFLASH_SMEM_BYTES;
constexpr int kParamsBytes = CUFLASH_PARAMS_BYTES;

constexpr int kNumThreads = kNumWarps * 32;
constexpr int kElementBytes = kDType == DType::kFloat32 ? 4 : 2;
constexpr int kChunkElements = 16 / kElementBytes;  // one 128-bit access

constexpr int kOutBytes = kOutDType == DType::kFloat32 ? 4 : 2;
static_assert(kOutDType == kDType || kOutDType == DType::kFloat32, "out has the input dtype or float32");

// Kernels that work on tiles.
#ifdef CUFLASH_HEAD_DIM
constexpr int kHeadDim = CUFLASH_HEAD_DIM;     // columns of q and k in shared memory; the caller's may be fewer
constexpr int kHeadDimV = CUFLASH_HEAD_DIM_V;  // columns of v and out that one block owns; 0 without v
constexpr int kBlockQ = CUFLASH_BLOCK_Q;       // query rows of a block
constexpr int kBlockK = CUFLASH_BLOCK_K;       // keys of a tile
constexpr int kStages = CUFLASH_STAGES;        // depth of the ring of tiles that come
static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0, "head dims are padded to multiples of 32");
static_assert(kBlockK % 16 == 0, "a key tile is whole 16-key steps");
#endif

// Those of them that multiply by mma.sync.
#ifdef CUFLASH_QK_UNROLL
constexpr int kBlocksPerSm = CUFLASH_BLOCKS_PER_SM;
constexpr bool kQInRegisters = CUFLASH_Q_IN_REGISTERS;
constexpr int kQkUnroll = CUFLASH_QK_UNROLL;  // steps of q kᵀ, and for float32 of every product, in one piece
static_assert(kStages == 1 || kStages == 2, "the ring is one or two tiles deep");
#endif

// Those that multiply by wgmma: one warpgroup copies, the others compute. A stage of the ring is a tile of k or of v.
#ifdef CUFLASH_Q_STAGES
constexpr int kQStages = CUFLASH_Q_STAGES;                // query tiles in shared memory
constexpr int kQSteps = CUFLASH_Q_COLUMNS / 16;           // steps of q kᵀ whose columns of q stay in registers
constexpr bool kQInRegisters = 16 * kQSteps == kHeadDim;  // all of them
constexpr int kOutPanels = CUFLASH_OUT_PANELS;            // of 128 bytes, of a warp's rows of out that leave at a time
constexpr bool kSoftcap = CUFLASH_SOFTCAP;                // scores are capped
constexpr bool kPingPong = CUFLASH_PING_PONG;             // warpgroups issue their products in turn
constexpr int kNumConsumers = kNumWarps / 4 - 1;          // warpgroups that compute
constexpr int kGroupRows = 64;                            // queries of one of them
static_assert(kBlockQ == kGroupRows * kNumConsumers, "they share the queries of a block");
#endif

// Backward by wgmma: one warpgroup copies, two compute.
#ifdef CUFLASH_DS_STAGES
constexpr int kDsStages = CUFLASH_DS_STAGES;      // tiles of ds in shared memory
constexpr int kKSteps = CUFLASH_K_STEPS;          // steps of k qᵀ whose columns of k stay in registers …
constexpr int kVSteps = CUFLASH_V_STEPS;          // … and of v doutᵀ
constexpr bool kSoftcap = CUFLASH_SOFTCAP;        // scores are capped
constexpr int kNumConsumers = kNumWarps / 4 - 1;  // warpgroups that compute
constexpr int kGroupKeys = 64;                    // keys of one of them
static_assert(kNumConsumers == 2 && kBlockK == 2 * kGroupKeys, "two warpgroups share the keys of a block");
#endif

// One gradient by wgmma: one warpgroup copies, the others share the rows of a block.
#ifdef CUFLASH_GRADIENT
enum class Gradient { kDq = 0, kDk = 1, kDv = 2 };
constexpr Gradient kGradient = static_cast<Gradient>(CUFLASH_GRADIENT);
constexpr int kSecondStages = CUFLASH_SECOND_STAGES;  // tiles of v or dout in shared memory; kStages of k or q
constexpr bool kSoftcap = CUFLASH_SOFTCAP;            // scores are capped
constexpr int kNumConsumers = kNumWarps / 4 - 1;      // warpgroups that compute
constexpr int kGroupRows = 64;                        // rows of one of them
#endif

// The kernel whose blocks own keys.
#ifdef CUFLASH_WARP_KEYS
constexpr int kWarpKeys = CUFLASH_WARP_KEYS;             // keys of a warp
constexpr int kPieceQ = CUFLASH_PIECE_Q;                 // queries that a warp takes at a time
constexpr bool kWithDq = CUFLASH_WITH_DQ;                // whether dq is added up too
constexpr bool kSharedWeights = CUFLASH_SHARED_WEIGHTS;  // p and ds take turns in one buffer
constexpr int kGroup =
    kNumWarps * kWarpKeys / kBlockK;  // warps with the same keys: each has its own queries and columns
static_assert(kWarpKeys % 16 == 0 && kNumWarps * kWarpKeys % kBlockK == 0, "warps own whole 16-key fragments");
static_assert(kGroup == 1 ? kBlockQ % kPieceQ == 0 : kBlockQ == kGroup * kPieceQ, "pieces cover the tile");
static_assert(kPieceQ % 16 == 0, "a piece is whole 16-query steps");
#endif
