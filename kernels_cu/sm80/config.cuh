// Typed constants for the macros of the mma.sync kernels.
#pragma once
#include "../common/config.cuh"

enum class Algorithm { kFlash1 = 1, kFlash2 = 2, kFlashD = 3 };

constexpr Algorithm kAlgorithm = static_cast<Algorithm>(CUFLASH_ALGORITHM);
constexpr int kBlocksPerSm = CUFLASH_BLOCKS_PER_SM;  // thread blocks that must fit on an SM
constexpr bool kQInRegisters = CUFLASH_Q_IN_REGISTERS;
constexpr int kQkUnroll = CUFLASH_QK_UNROLL;  // unrolled steps of q kᵀ; for float32, of every product (L8)
static_assert(kStages == 1 || kStages == 2, "the ring is one or two tiles deep");

// Constants of the kernel whose thread blocks own keys.
#ifdef CUFLASH_WARP_KEYS
constexpr int kWarpKeys = CUFLASH_WARP_KEYS;             // keys of a warp
constexpr int kPieceQ = CUFLASH_PIECE_Q;                 // queries of a warp at a time
constexpr bool kWithDq = CUFLASH_WITH_DQ;                // the kernel also adds to dq
constexpr bool kSharedWeights = CUFLASH_SHARED_WEIGHTS;  // p and ds use the same buffer, one after the other
constexpr int kGroup = kNumWarps * kWarpKeys / kBlockK;  // warps that own the same keys, but other queries and columns
static_assert(kWarpKeys % 16 == 0 && kNumWarps * kWarpKeys % kBlockK == 0, "warps own whole 16-key fragments");
static_assert(kGroup == 1 ? kBlockQ % kPieceQ == 0 : kBlockQ == kGroup * kPieceQ, "pieces cover the tile");
static_assert(kPieceQ % 16 == 0, "a piece is whole 16-query steps");
#endif
