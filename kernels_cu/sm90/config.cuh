// Compile-time constants of the wgmma kernels, from the macros of the host. Warpgroup 0 of a thread block copies (the
// producer); the others compute (the consumers).
#pragma once
#include "../common/config.cuh"

constexpr bool kIsFloat16 = kDType == DType::kFloat16;
constexpr int kNumConsumers = kNumWarps / 4 - 1;  // consumer warpgroups
constexpr int kConsumerThreads = 128 * kNumConsumers;
constexpr int kGroupRows = 64;  // rows of a wgmma: queries, or keys, of one consumer
#ifdef CUFLASH_PAGED
constexpr bool kPaged = true;  // Keys lie in pages. A variant, as skipped paging code costs 3 to 4 % of a call (L50).
#else
constexpr bool kPaged = false;
#endif
#ifdef CUFLASH_Q_STAGES
constexpr bool kHasScheduler = kVarlen;  // a scheduler warp reads the lengths and schedules work tiles
#else
constexpr bool kHasScheduler = false;
#endif
constexpr bool kOneTilePerBlock = kReadsAhead;  // at most one work tile for each thread block
// Thread blocks on an SM. With two, the next call's thread blocks start while this call's end.
constexpr int kMinBlocks = kOneTilePerBlock && kHeadDimV <= 128 ? 2 : 1;
// Registers of a thread at launch, then of a producer and of a consumer thread. A warpgroup that requests more
// registers than were released waits forever (L48). With kHasScheduler, page copies need more than 24. Even without
// pages, 24 registers cost causal calls 2 % at d 128.
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
// Few queries of each sequence: all heads of a group share a thread block (decode/decode.cu).
constexpr bool kDecode = true;
#else
constexpr bool kDecode = false;
#endif

// Forward and lse. A stage of the ring is a tile of k or a tile of v.
#ifdef CUFLASH_Q_STAGES
constexpr int kQStages = CUFLASH_Q_STAGES;                // query blocks in shared memory
constexpr int kQSteps = CUFLASH_Q_COLUMNS / 16;           // 16-column steps of q kᵀ with q in registers
constexpr bool kQInRegisters = 16 * kQSteps == kHeadDim;  // true if all columns of q stay in registers
constexpr int kOutPanels = CUFLASH_OUT_PANELS;            // panels of a warp's rows of out stored at a time
#ifdef CUFLASH_FEW
constexpr bool kFewSequences = true;  // decode of at most 32 sequences that are not packed
#else
constexpr bool kFewSequences = false;
#endif
constexpr bool kWarpsSplitKeys =
    kBlockQ == 16;  // the warps of the only consumer split keys, not queries (decode/narrow.cu)
// True if warpgroups exchange registers. With split keys, one thread block alone on an SM has enough for each
// warpgroup.
constexpr bool kSetsRegisters = !kWarpsSplitKeys || kMinBlocks == 2;
static_assert(!kOneTilePerBlock || (kWarpsSplitKeys && kFewSequences && !kPaged),
              "only decode/narrow.cu passes over a work tile that is void");
constexpr bool kPingPong = CUFLASH_PING_PONG;  // true if warpgroups issue their products alternately (ping-pong)
static_assert(kWarpsSplitKeys || kBlockQ == kGroupRows * kNumConsumers, "the consumers share the queries of a block");
#endif

// Backward for dq, dk and dv in one kernel.
#ifdef CUFLASH_DS_STAGES
constexpr int kDsStages = CUFLASH_DS_STAGES;  // tiles of ds in shared memory
constexpr int kKSteps = CUFLASH_K_STEPS;      // 16-column steps of k qᵀ with k in registers
static_assert(kNumConsumers == 2 && kBlockK == 2 * kGroupRows, "two consumers share the keys of a block");
#endif

// The same, or backward in clusters.
#ifdef CUFLASH_V_STEPS
constexpr int kVSteps = CUFLASH_V_STEPS;  // 16-column steps of v doutᵀ with v in registers
#endif

// Backward for one gradient.
#ifdef CUFLASH_GRADIENT
enum class Gradient { kDq = 0, kDk = 1, kDv = 2 };
constexpr Gradient kGradient = static_cast<Gradient>(CUFLASH_GRADIENT);
// kStages counts tiles of k or q.
constexpr int kSecondStages = CUFLASH_SECOND_STAGES;  // tiles of v or dout in shared memory
#endif

// Backward of either kind: true if thread blocks share the query heads of each key block.
#ifdef CUFLASH_SHARES_HEADS
constexpr bool kSharesHeads = true;
#else
constexpr bool kSharesHeads = false;
#endif
