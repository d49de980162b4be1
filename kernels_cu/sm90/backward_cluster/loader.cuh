// The loading warps of backward in clusters: k and v, and q, dout, lse and delta of each step.
#pragma once
#include "../../ptx/cp_async.cuh"
#include "storage.cuh"

// The warp that loads tiles. Its lanes run together, and the first lane acts (L13).
struct Loader : Role {
  using Role::Role;

  // Issues the loads of k and v, which count at the barriers of the first tiles.
  __device__ __forceinline__ void load_keys() const {
    const auto of = sequence();
    const auto keys = not_before<kGroupRows>(of.visible_keys_from(first_key()));
    const auto peer_keys = not_before<kGroupRows>(of.visible_keys_from(block * kBlockK + (rank ^ 1) * kGroupRows));
    mbarrier_expect_tx(smem.q_full, kBytesQk + kBytesPeerK), mbarrier_expect_tx(smem.dout_full, kBytesV);
    load_panels<kPanelsQk>(params.k_map, smem.k, kPanelBytes, smem.q_full, keys, kv_head);
    load_panels<kPanelsV>(params.v_map, smem.v, kPanelBytes, smem.dout_full, keys, kv_head);
#pragma unroll
    for (int panel = 0; panel < kDqPanels; ++panel) {
      load_box(smem.peer_k + panel * kPanelBytes, params.k_map, smem.q_full, rank * kDqColumns + panel * kPanelColumns,
               peer_keys, kv_head);
    }
  }

  __device__ __forceinline__ void run() {
    if (is_leader && count() > 0) load_keys();
    __syncwarp();
    unsigned n = 0;
    for_each_step(n, [&](int head, int m, bool) {
      const unsigned q_full = smem.q_full + 8 * (n % kStages), dout_full = smem.dout_full + 8 * (n % kStages);
      const auto rows = sequence().visible_queries_from(m * kBlockQ);
      wait_empty(smem.q_empty, n);
      if (is_leader) {
        mbarrier_arrive_expect_tx(q_full, kBytesQk);
        load_panels<kPanelsQk>(params.q_map, q(n), kPanelBytes, q_full, rows, head);
      }
      __syncwarp();
      wait_empty(smem.dout_empty, n);
      if (is_leader) {
        mbarrier_arrive_expect_tx(dout_full, kBytesV);
        load_panels<kPanelsV>(params.dout_map, dout(n), kPanelBytes, dout_full, rows, head);
      }
      __syncwarp();
    });
  }
};

// A warp that loads lse and delta. By cp.async, as racecheck would need a fence in each lane that reads what TMA will
// overwrite (L41); and not in the other loading warp, whose registers do not suffice.
struct StatsLoader : Role {
  using Role::Role;

  // Every lane arrives at the barrier.
  __device__ __forceinline__ void load(unsigned target, const float* stats, unsigned barrier) const {
    const unsigned lane = threadIdx.x % 32;
    if (lane < kBlockQ / 4) cp_async_16(target + lane * 16, stats + lane * 4);
    cp_async_mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void run() {
    unsigned n = 0;
    for_each_step(n, [&](int head, int m, bool) {
      const unsigned slot = n % kStages, target = smem.stats + slot * 2 * kBytesStats;
      const float* const lse = params.stats + 2 * (sequence().query_head(head) * params.stats_rows) + m * kBlockQ;
      wait_empty(smem.q_empty, n);
      load(target, lse, smem.q_full + 8 * slot);
      wait_empty(smem.dout_empty, n);
      load(target + kBytesStats, lse + params.stats_rows, smem.dout_full + 8 * slot);
    });
  }
};
