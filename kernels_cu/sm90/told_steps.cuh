// Steps of backward on Hopper under a mask of the caller's own: one warp of a block of threads knows those in which
// something is seen, and tells the others of them through a ring in shared memory.
#pragma once
#include "../common/cells.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mbarrier.cuh"
#include "config.cuh"

static_assert(!kBlockSparse || !kVarlen, "tiles of the rows that are seen are not made of whole cells");

// A step, a tile and a query head; or the end of the steps of a block of keys, or of other rows. Or a block that
// begins, whose number is in the place of the head.
struct TileStep {
  int head;
  SeenTile tile;

  __device__ __forceinline__ bool is_end() const { return tile.is_end(); }
};

// A warp's place in the ring. Without cells nobody is told: each warp knows all steps.
// kReaders: warps that are told.
template <bool kEnabled, int kReaders>
struct ToldStepsOf {
  struct Ring {
    __device__ void init() const {}
  };

  __device__ __forceinline__ explicit ToldStepsOf(const Ring&) {}
  __device__ __forceinline__ void tell(const TileStep&) {}
  __device__ __forceinline__ TileStep hear() { return {0, SeenTile::end()}; }
};

template <int kReaders>
struct ToldStepsOf<true, kReaders> {
  static constexpr int kSlots =
      8;  // why so many: the warp that takes turns at dq is ahead of the others; blocks take two

  struct Ring {
    uint2 slots[kSlots];
    unsigned long long full[kSlots], empty[kSlots];

    // One thread calls.
    __device__ void init() const {
      for (int i = 0; i < kSlots; ++i) {
        mbarrier_init(smem_address(&full[i]), 1), mbarrier_init(smem_address(&empty[i]), kReaders);
      }
    }
  };

  unsigned ring;        // its address in shared memory
  unsigned number = 0;  // of what is told next

  __device__ __forceinline__ explicit ToldStepsOf(const Ring& in_memory) : ring(smem_address(&in_memory)) {}

  // All lanes of the one warp call.
  __device__ __forceinline__ void tell(const TileStep& told) {
    mbarrier_wait(empty(), (number / kSlots & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
      st_shared_u32(slot(), told.head), st_shared_u32(slot() + 4, told.tile.bits);
      mbarrier_arrive(full());
    }
    __syncwarp();
    ++number;
  }

  // All lanes of any other warp call. why one lane reads: L41. why it gives the place back after all have what it has
  // read: L40.
  __device__ __forceinline__ TileStep hear() {
    mbarrier_wait(full(), number / kSlots & 1);
    unsigned head = 0, bits = 0;
    if (threadIdx.x % 32 == 0) ld_shared_v2(head, bits, slot());
    head = __shfl_sync(0xffffffffu, head, 0), bits = __shfl_sync(0xffffffffu, bits, 0);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
    __syncwarp();
    ++number;
    return {static_cast<int>(head), SeenTile(static_cast<int>(bits))};
  }

 private:
  __device__ __forceinline__ unsigned slot() const { return ring + number % kSlots * 8; }
  __device__ __forceinline__ unsigned full() const { return ring + kSlots * 8 + number % kSlots * 8; }
  __device__ __forceinline__ unsigned empty() const { return full() + kSlots * 8; }
};
template <int kReaders>
using StepRing = ToldStepsOf<kBlockSparse, kReaders>;
