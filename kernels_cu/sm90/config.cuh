// The macros of the wgmma kernels, as typed constants. Warpgroup 0 of a block copies (the producer), the others compute
// (the consumers).
#pragma once
#include "../common/config.cuh"

constexpr bool kIsFloat16 = kDType == DType::kFloat16;
constexpr int kNumConsumers = kNumWarps / 4 - 1;  // warpgroups that compute
constexpr int kConsumerThreads = 128 * kNumConsumers;
constexpr int kGroupRows = 64;  // of a product: the queries, or the keys, of a consumer
#ifdef CUFLASH_PAGED
constexpr bool kPaged = true;  // keys lie in pages. why no number: L50
#else
constexpr bool kPaged = false;
#endif
#ifdef CUFLASH_Q_STAGES
constexpr bool kHasScheduler = kVarlen;  // a warp with registers of its own reads lengths and schedules work
#else
constexpr bool kHasScheduler = false;
#endif
constexpr bool kOneTilePerBlock = kReadsAhead;  // each thread block has at most one work tile
// Thread blocks of an SM. why two: those of the next call begin while those of this one end.
constexpr int kMinBlocks = kOneTilePerBlock && kHeadDimV <= 128 ? 2 : 1;
// why: a warpgroup that asks for more registers than the block was started with and the others gave back waits for
// ever. Copies of pages need more than 24 registers; without pages, too, 24 cost causal calls at d 128 2 %.
constexpr int kStartRegisters = kNumConsumers == 3 || kMinBlocks == 2 ? 128 : kNumConsumers == 2 ? 168 : 248;
constexpr int kProducerRegisters = kNumConsumers == 3   ? 32
                                   : kMinBlocks == 2    ? 88
                                   : kNumConsumers == 1 ? 152
                                   : kHasScheduler      ? 40
                                                        : 24;
constexpr int kConsumerRegisters = kNumConsumers == 3   ? 160
                                   : kMinBlocks == 2    ? 168
                                   : kNumConsumers == 1 ? 248
                                   : kHasScheduler      ? 232
                                                        : 240;
static_assert(kProducerRegisters + kNumConsumers * kConsumerRegisters <= (kNumConsumers + 1) * kStartRegisters, "");

#ifdef CUFLASH_DECODES
constexpr bool kDecode = true;  // few queries of each sequence: the heads of a group share blocks (decode/decode.cu)
#else
constexpr bool kDecode = false;
#endif

// Forward and lse. A stage of the ring is a tile of k or a tile of v.
#ifdef CUFLASH_Q_STAGES
constexpr int kQStages = CUFLASH_Q_STAGES;                // query blocks in shared memory
constexpr int kQSteps = CUFLASH_Q_COLUMNS / 16;           // steps of q kᵀ whose columns of q stay in registers
constexpr bool kQInRegisters = 16 * kQSteps == kHeadDim;  // whether all columns of q do
constexpr int kOutPanels = CUFLASH_OUT_PANELS;            // panels of a warp's rows of out that are stored at a time
#ifdef CUFLASH_FEW
constexpr bool kFewSequences = true;  // decoding at most 32 sequences, none of them packed
#else
constexpr bool kFewSequences = false;
#endif
constexpr bool kWarpsSplitKeys =
    kBlockQ == 16;  // the warps of the one consumer share keys, not queries (decode/narrow.cu)
// Whether warpgroups exchange registers. why not for all: a block of few rows that is alone has enough for each.
constexpr bool kSetsRegisters = !kWarpsSplitKeys || kMinBlocks == 2;
static_assert(!kOneTilePerBlock || (kWarpsSplitKeys && kFewSequences && !kPaged),
              "only decode/narrow.cu passes over a work tile that is void");
constexpr bool kPingPong = CUFLASH_PING_PONG;  // whether only one warpgroup issues products at a time
static_assert(kWarpsSplitKeys || kBlockQ == kGroupRows * kNumConsumers, "the consumers share the queries of a block");
#endif

// Backward for dq, dk and dv together.
#ifdef CUFLASH_DS_STAGES
constexpr int kDsStages = CUFLASH_DS_STAGES;  // tiles of ds in shared memory
constexpr int kKSteps = CUFLASH_K_STEPS;      // steps of k qᵀ whose columns of k stay in registers
constexpr int kVSteps = CUFLASH_V_STEPS;      // steps of v doutᵀ whose columns of v stay in registers
static_assert(kNumConsumers == 2 && kBlockK == 2 * kGroupRows, "two consumers share the keys of a block");
#endif

// Backward for one gradient.
#ifdef CUFLASH_GRADIENT
enum class Gradient { kDq = 0, kDk = 1, kDv = 2 };
constexpr Gradient kGradient = static_cast<Gradient>(CUFLASH_GRADIENT);
constexpr int kSecondStages = CUFLASH_SECOND_STAGES;  // tiles of v or dout in shared memory; kStages are of k or q
#endif

// Backward of either kind: whether thread blocks share the query heads of each key block.
#ifdef CUFLASH_SHARES_HEADS
constexpr bool kSharesHeads = true;
#else
constexpr bool kSharesHeads = false;
#endif
