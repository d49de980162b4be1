// The steps of backward on Hopper under a mask_mod. One warp of a thread block finds the visible tiles, and pushes them
// to the other warps through a ring in shared memory.
#pragma once
#include "../../common/mask_tiles.cuh"
#include "../../ptx/ldmatrix.cuh"
#include "../../ptx/mbarrier.cuh"
#include "../config.cuh"

static_assert(!kBlockSparse || !kVarlen, "tiles of the rows that are visible are not made of whole mask tiles");

// An entry of the ring: a query head and a tile, an end marker, or a new key block (its index is in `head`).
struct TileStep {
  int head;
  VisibleTile tile;

  __device__ __forceinline__ bool is_end() const { return tile.is_end(); }
};

// A warp's view of the ring, which kReaders warps read. Unless block-sparse, nothing is pushed: each warp computes all
// steps itself.
template <bool kEnabled, int kReaders>
struct StepRingOf {
  struct Ring {
    __device__ void init() const {}
  };

  __device__ __forceinline__ explicit StepRingOf(const Ring&) {}
  __device__ __forceinline__ void push(const TileStep&) {}
  __device__ __forceinline__ TileStep pop() { return {0, VisibleTile::end()}; }
};

template <int kReaders>
struct StepRingOf<true, kReaders> {
  // The semaphore warp of dq runs ahead of the others, and each key block takes two more entries.
  static constexpr int kSlots = 8;

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

  unsigned ring;        // address in shared memory
  unsigned number = 0;  // index of the next step to push or pop

  __device__ __forceinline__ explicit StepRingOf(const Ring& in_memory) : ring(smem_address(&in_memory)) {}

  // Called by all lanes of the one writing warp.
  __device__ __forceinline__ void push(const TileStep& tile_step) {
    mbarrier_wait(empty(), (number / kSlots & 1) ^ 1);
    if (threadIdx.x % 32 == 0) {
      st_shared_u32(slot(), tile_step.head), st_shared_u32(slot() + 4, tile_step.tile.bits);
      mbarrier_arrive(full());
    }
    __syncwarp();
    ++number;
  }

  // Called by all lanes of each reading warp. One lane reads (racecheck, L41), and releases the slot after the
  // broadcast has used the data (L40).
  __device__ __forceinline__ TileStep pop() {
    mbarrier_wait(full(), number / kSlots & 1);
    unsigned head = 0, bits = 0;
    if (threadIdx.x % 32 == 0) ld_shared_v2(head, bits, slot());
    head = __shfl_sync(0xffffffffu, head, 0), bits = __shfl_sync(0xffffffffu, bits, 0);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
    __syncwarp();
    ++number;
    return {static_cast<int>(head), VisibleTile(static_cast<int>(bits))};
  }

 private:
  __device__ __forceinline__ unsigned slot() const { return ring + number % kSlots * 8; }
  __device__ __forceinline__ unsigned full() const { return ring + kSlots * 8 + number % kSlots * 8; }
  __device__ __forceinline__ unsigned empty() const { return full() + kSlots * 8; }
};
template <int kReaders>
using StepRing = StepRingOf<kBlockSparse, kReaders>;
