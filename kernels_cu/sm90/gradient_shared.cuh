// dk and dv of a key block that several blocks of threads share, each some of its query tiles: added up in turns, in
// the order of the fragments. The last one has them all.
#pragma once
#include "gradient.cuh"
#include "turns.cuh"

__device__ __forceinline__ bool shares_keys(const Role& role) {
  const BackwardParams& p = role.params.backward;
  return blockIdx.x >= p.whole_blocks && role.end - role.begin < p.num_q_blocks * p.heads_per_kv;
}

// The thread's part of key block `nth` of those that are shared.
template <int kCount>
__device__ __forceinline__ void add_up_shared(float (&x)[kCount], float* acc, unsigned nth, int thread, bool first,
                                              bool last) {
  constexpr int kThreads = 128 * kNumConsumers;
  float4* const at = reinterpret_cast<float4*>(acc) + static_cast<long long>(nth) * (kThreads * kCount / 4) + thread;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    float* const y = x + 4 * i;
    if (last) {
      const float4 sum = __ldcg(at + kThreads * i);
      y[0] += sum.x, y[1] += sum.y, y[2] += sum.z, y[3] += sum.w;
    } else if (first) {
      __stcg(at + kThreads * i, make_float4(y[0], y[1], y[2], y[3]));
    } else {
      red_add_v4_f32(reinterpret_cast<float*>(at + kThreads * i), y[0], y[1], y[2], y[3]);
    }
  }
}

// Whether this block is the last one, whose dk and dv are whole now. `thread`: of those that compute, all of which
// call.
template <int kDk, int kDv>
__device__ __forceinline__ bool add_up_shared(const Role& role, float (&dk)[kDk], float (&dv)[kDv], int thread) {
  const BackwardParams& p = role.params.backward;
  const unsigned nth = role.index - 1 - p.shared_first, steps = p.num_q_blocks * p.heads_per_kv;
  const unsigned sharers = ((nth + 1) * steps - 1) / p.shared_steps - nth * steps / p.shared_steps + 1;
  unsigned* const counter = p.turns + static_cast<long long>(p.batch) * p.heads_q * p.num_q_blocks + nth;
  if (thread == 0) {
    const unsigned came = come_to(counter), rank = rank_of(came);
    await_turn(counter, came, rank, rank == sharers - 1);
    st_shared_u32(role.smem.shared_rank, rank);
  }
  bar_sync(kDsBarrier, 128 * kNumConsumers);
  const unsigned rank = ld_shared_u32(role.smem.shared_rank);
  const bool last = rank == sharers - 1;
  add_up_shared(dk, p.dk_acc, nth, thread, rank == 0, last);
  add_up_shared(dv, p.dv_acc, nth, thread, rank == 0, last);
  if (last) return true;
  __threadfence();
  bar_sync(kDsBarrier, 128 * kNumConsumers);
  if (thread == 0) tell_added(counter);
  return false;
}
