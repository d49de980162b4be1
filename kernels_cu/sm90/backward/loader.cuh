// The loading warp of backward on Hopper: q, dout, lse and delta of each step, and k and v of each key block.
#pragma once
#include "storage.cuh"

// One warp whose lanes run together and whose first lane acts (L13).
struct Loader : Role {
  using Role::Role;

  // Waits until the consumers have released k and v, and then arrives at their barriers. In a key block without steps
  // nothing else holds them back, and this wait could be for a phase that never ends.
  __device__ __forceinline__ void wait_for_kv(unsigned parity) const {
    mbarrier_wait(smem.kv_empty, parity);
    __syncwarp();
    bar_arrive(kKeysConsumed, kKeysThreads);
    if (kLeavesByDq) bar_arrive(kKeysConsumed + 1, kKeysThreads);
  }

  __device__ __forceinline__ void run() {
    unsigned step = 0, kv_parity = 1;
    schedule();
#pragma unroll 1
    for (; lead_block(); kv_parity ^= 1) {
      const unsigned first_step = step;
      lead_each_step(step, [&](int head, int m, bool) {
        const unsigned slot = step % kStages, empty = (step / kStages + 1) & 1;
        const unsigned q_full = smem.q_full + 8 * slot, dout_full = smem.dout_full + 8 * slot;
        const bool first = step == first_step;
        const auto of = sequence();
        const auto rows = read(of.visible_queries_from(m * kBlockQ));  // no work between wait and copy (L17)
        const auto keys = of.visible_keys_from(block * kBlockK);
        const int dim = params.problem.head_dim, dim_v = params.problem.head_dim_v;
        const unsigned stats_smem = smem.stats + slot * kBytesStats;
        const float* const lse = stats(head) + m * kBlockQ;
        mbarrier_wait(smem.q_empty + 8 * slot, empty);
        if (is_leader) {
          mbarrier_arrive_expect_tx(q_full, kBytesQ + kBytesStats / 2 + (first ? kBytesK : 0));
          load_panels<kPanelsQk>(params.q_map, smem.q + slot * kBytesQ, kPanelBytesQ, q_full, boxed(rows, kBlockQ, dim),
                                 head);
          bulk_load(stats_smem, lse, kBytesStats / 2, q_full);
        }
        __syncwarp();
        if (first) {
          wait_for_kv(kv_parity);
          const auto box = boxed(keys, kBlockK, dim);
          if (is_leader) load_panels<kPanelsQk>(params.k_map, smem.k, kPanelBytesK, q_full, box, kv_head);
          __syncwarp();
        }
        mbarrier_wait(smem.dout_empty + 8 * slot, empty);
        if (is_leader) {
          mbarrier_arrive_expect_tx(dout_full, kBytesDout + kBytesStats / 2 + (first ? kBytesV : 0));
          if (first) {
            load_panels<kPanelsV>(params.v_map, smem.v, kPanelBytesK, dout_full, boxed(keys, kBlockK, dim_v), kv_head);
          }
          load_panels<kPanelsV>(params.dout_map, smem.dout + slot * kBytesDout, kPanelBytesQ, dout_full,
                                boxed(rows, kBlockQ, dim_v), head);
          bulk_load(stats_smem + kBytesStats / 2, lse + params.stats_rows, kBytesStats / 2, dout_full);
        }
        __syncwarp();
      });
      if (step == first_step) wait_for_kv(kv_parity);
      schedule();
    }
  }
};
