// A ring of work tiles for variable-length sequences in backward on Hopper. One warp of a thread block schedules them
// for all warps that use them.
#pragma once
#include "../../ptx/mbarrier.cuh"
#include "visible_sequence.cuh"

// A work tile: one head of a key or query block listed by delta.cu (portable/key_blocks.cuh).
struct alignas(16) ScheduledBlock {
  VisibleBlock of;
  int head;  // kNoWork at the end
  int share[3];
};

// A warp's view of a ring of work tiles in shared memory, which kReaders warps read.
template <int kSlots, int kReaders>
struct WorkRing {
  struct Ring {
    ScheduledBlock slots[kSlots];
    unsigned long long full[kSlots], empty[kSlots];

    // One thread calls.
    __device__ void init() const {
      for (int i = 0; i < kSlots; ++i) {
        mbarrier_init(smem_address(&full[i]), 1), mbarrier_init(smem_address(&empty[i]), 32 * kReaders);
      }
    }
  };

  unsigned ring;            // address in shared memory
  unsigned number = kNone;  // index of the current work tile in this thread block

  __device__ __forceinline__ explicit WorkRing(const Ring& in_memory) : ring(smem_address(&in_memory)) {}

  // Waits until work tile n may be pushed.
  __device__ __forceinline__ void wait_place(unsigned n) const { mbarrier_wait(empty(n), (n / kSlots & 1) ^ 1); }

  // Pushes work tile n, or the end marker. One thread calls.
  __device__ __forceinline__ void push(unsigned n, const void* list, int block,
                                       const unsigned (&head_and_share)[4]) const {
    st_shared_v4(slot(n) + kHeadOffset, head_and_share);
    mbarrier_arrive_expect_tx(full(n), sizeof(VisibleBlock));
    bulk_load(slot(n), static_cast<const VisibleBlock*>(list) + block, sizeof(VisibleBlock), full(n));
  }
  __device__ __forceinline__ void end(unsigned n) const {
    st_shared_u32(slot(n) + kHeadOffset, unsigned(kNoWork));
    mbarrier_arrive(full(n));
  }

  // Releases the current work tile and advances; returns false at the end.
  __device__ __forceinline__ bool go_on() {
    if (number != kNone) mbarrier_arrive(empty(number));  // every lane, for racecheck (L41)
    ++number;
    mbarrier_wait(full(number), number / kSlots & 1);
    return scheduled_head() != kNoWork;
  }

  // Members of the current work tile. They are read again at each use, as they would hold registers (L5).
  __device__ __forceinline__ VisibleSequence sequence() const { return {slot(number)}; }
  __device__ __forceinline__ int scheduled_block() const { return ld_shared_u32(slot(number) + kBlockOffset); }
  __device__ __forceinline__ WholeSequence whole_sequence() const {
    static_assert(kSlots > 0 && kListsSeqlens, "whole sequences are not listed");
    unsigned x[5];
    x[0] = ld_shared_u32(slot(number) + kSeqlensOffset);
    ld_shared_v2(x[1], x[2], slot(number) + kSeqlensOffset + 4);
    ld_shared_v2(x[3], x[4], slot(number) + kSeqlensOffset + 12);
    WholeSequence whole;
    memcpy(&whole, x, sizeof(x));
    return whole;
  }
  __device__ __forceinline__ int scheduled_head() const { return ld_shared_u32(slot(number) + kHeadOffset); }
  __device__ __forceinline__ int share(int i) const { return ld_shared_u32(slot(number) + kHeadOffset + 4 + 4 * i); }

 private:
  static constexpr unsigned kNone = ~0u, kHeadOffset = sizeof(VisibleBlock);
  // Byte offsets in VisibleBlock.
  static constexpr unsigned kSeqlensOffset = 52, kBlockOffset = kListsSeqlens ? 72 : 52;
  static constexpr int kNoWork = -1;

  __device__ __forceinline__ unsigned slot(unsigned n) const { return ring + n % kSlots * sizeof(ScheduledBlock); }
  __device__ __forceinline__ unsigned full(unsigned n) const {
    return ring + kSlots * sizeof(ScheduledBlock) + n % kSlots * 8;
  }
  __device__ __forceinline__ unsigned empty(unsigned n) const { return full(n) + kSlots * 8; }
};
