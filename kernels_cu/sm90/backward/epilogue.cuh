// The end of a key block in backward on Hopper: dk and dv leave the registers.
#pragma once
#include "../pipeline/shared_keys.cuh"
#include "storage.cuh"

// A warp of a consumer, with its rows of dk and dv.
struct KeyGradients : Role {
  const int group, warp;  // the consumer's number; the warp's number within it
  float dk[kHeadDim / 2], dv[kHeadDimV / 2];

  __device__ __forceinline__ KeyGradients(const Params& p, const Addresses& addresses, int warp_idx)
      : Role(p, addresses), group(warp_idx / 4), warp(warp_idx % 4) {}

  // Issues the stores of the warp's rows of dk or dv.
  template <int kColumns>
  __device__ __forceinline__ void store(const TensorMap& map, float (&x)[kColumns / 2], float scale,
                                        unsigned place) const {
    const auto of = sequence();
    const int key = block * kBlockK + group * kGroupRows + warp * 16;
    zero_outside(x, key + fresh_thread() % 32 / 4, of.visible_keys());
    store_rows<kColumns>(map, x, scale, place, kLeavesByDq ? 2048 : kPanelBytesK, of.keys_from(key), kv_head,
                         is_leader);
  }

  // Adds up dk and dv of a shared key block. Returns true if this thread block has the whole sums.
  __device__ __forceinline__ bool add_up() {
    const int thread = (group * 4 + warp) * 32 + fresh_thread() % 32;
    const unsigned nth = nth_shared();
    return add_in_order(shared_counter(), num_sharers(), smem.shared_rank, kDsWritten, thread,
                        [&](bool first, bool last) {
                          add_up_shared(dk, params.dk_acc, nth, thread, first, last);
                          add_up_shared(dv, params.dv_acc, nth, thread, first, last);
                        });
  }

  // Adds the warp's rows of dk or dv to the float32 rows of the call. From registers: staged as floats, they would make
  // the main loop spill registers at head dim 128.
  template <int kColumns>
  __device__ __forceinline__ void add(const Operand& sums, int columns, const float (&x)[kColumns / 2],
                                      float scale) const {
    const auto of = sequence();
    const int lane = fresh_thread() % 32, key = block * kBlockK + group * kGroupRows + warp * 16 + lane / 4;
    const Range visible = of.visible_keys();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (key + 8 * h < visible.begin || key + 8 * h >= visible.end) continue;
      float* const row = float_row(sums, of.keys_from(key + 8 * h), kv_head);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int column = lane_column<1>(j);
        if (column < columns) red_add_v2_f32(row + column, x[4 * j + 2 * h] * scale, x[4 * j + 2 * h + 1] * scale);
      }
    }
  }

  template <class AnyParams>
  __device__ __forceinline__ void add_gradients(const AnyParams& p) const {
    add<kHeadDimV>(p.dv, p.problem.head_dim_v, dv, Dropout(p, 0, 0).scale());
    add<kHeadDim>(p.dk, p.problem.head_dim, dk, p.problem.score.softmax_scale);
  }

  // Stores dk and dv before step n, through the shared memory of k and v, or through the warp's part of dq's.
  __device__ __forceinline__ void store_gradients(unsigned n) {
    constexpr unsigned kPartBytes = kBytesDq / 4, kRowBytesV = 2048 * kPanelsV;
    constexpr bool kBothFit = kRowBytesV + 2048 * kPanelsQk <= kPartBytes;
    static_assert(!kLeavesByDq || 2048 * const_max(kPanelsQk, kPanelsV) <= kPartBytes, "a warp's rows do not fit");
    const int row = group * kGroupRows + warp * 16, part = group * 4 + warp;
    unsigned place_v = smem.v + row * 128, place_k = smem.k + row * 128;
    if constexpr (kLeavesByDq) {
      place_v = smem.dq + part * kPartBytes, place_k = place_v + (kBothFit ? kRowBytesV : 0);
      if (n > 0) mbarrier_wait(smem.dq_empty + 8 * ((n - 1) & 1), (n - 1) / 2 & 1);
    }
    store<kHeadDimV>(params.dv_map, dv, Dropout(params, 0, 0).scale(), place_v);
    if constexpr (kLeavesByDq && !kBothFit) {
      if (is_leader) bulk_wait_read<0>();
      __syncwarp();
    }
    store<kHeadDim>(params.dk_map, dk, params.problem.score.softmax_scale, place_k);
    if (is_leader) bulk_wait_read<0>();
  }
};
