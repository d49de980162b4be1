// sinks_gradient: sums the gradient of the sinks over some queries of a head.
//
//   dsink = Σ exp(sink - lse) (dlse - delta) over all queries, delta = rowsum(dout ∘ out)
//
// A query without visible keys has delta 0 and the sink as its lse. A row without a sequence has lse -inf, and adds
// nothing.
//
// Roles    A thread block owns some slots of kPaddedSlot queries of a head; its warps take the slots in turn.
#include "../common/gradient_sums.cuh"
#include "../common/mods.cuh"
#include "../common/varlen.cuh"

using Params = WithMods<SinksGradientParams>;
static_assert(sizeof(Params) == kParamsBytes, "the host packs other parameters");

// The queries of a slot.
struct DenseSlot {
  const int num_slots;  // slots of a sequence
  const Sequence sequence;
  Range rows;

  __device__ __forceinline__ DenseSlot(const ProblemParams& p, int slot)
      : num_slots((p.seqlen_q + kPaddedSlot - 1) / kPaddedSlot), sequence{p, slot / num_slots} {
    rows.begin = slot % num_slots * kPaddedSlot, rows.end = min(rows.begin + kPaddedSlot, p.seqlen_q);
  }
};

struct VarlenSlot {
  const RowSlots row_slots;
  const VarlenSequence sequence;
  Range rows;

  // All lanes of a warp call together.
  __device__ __forceinline__ VarlenSlot(const ProblemParams& p, int slot)
      : row_slots(RowSlots::of_slot(axis_of_queries(p), slot, kPaddedSlot)), sequence(p, row_slots.sequence) {
    rows.begin = row_slots.row(slot, kPaddedSlot);
    rows.end = min(rows.begin + kPaddedSlot, sequence.seqlen_q());
  }
};
using Slot = Select<kVarlen, VarlenSlot, DenseSlot>;

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ Params p) {
  __shared__ float of_warps[kNumWarps];
  const int part = blockIdx.x / p.problem.heads_q, head = blockIdx.x % p.problem.heads_q;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int end = min((part + 1) * p.slots_each, p.num_slots);
  const float sink = Sink(p, head).sink;
  float sum = 0.0f;
#pragma unroll 1
  for (int slot = part * p.slots_each + warp; slot < end; slot += kNumWarps) {
    const Slot at(p.problem, slot);
    const Range visible = at.sequence.visible_queries();
    const long long first_lse = at.sequence.lse_offset(head);
    const float* const stats = p.stats + 2 * (at.sequence.query_head(head) * p.stats_rows);
    // Kernels that read stats as rows (stats_step 1) number varlen queries from the first one that sees a key.
    const int first = kVarlen && p.stats_step == 1 ? visible.begin : 0;
    for (int i = at.rows.begin + lane; i < at.rows.end; i += 32) {
      const float lse = p.lse[first_lse + i];
      if (lse == -infinity()) continue;
      float difference;  // dlse - delta
      if (i >= visible.begin && i < visible.end) {
        difference = -stats[static_cast<long long>(p.stats_step) * at.sequence.padded_query(i - first) + p.stats_delta];
      } else {
        difference = p.dlse != nullptr ? p.dlse[first_lse + i] : 0.0f;
      }
      sum += (sink == -infinity() ? 0.0f : expf(sink - lse)) * difference;
    }
  }
  sum = warp_sum(sum);
  if (lane == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kNumWarps; ++w) total += of_warps[w];
  p.tables[static_cast<long long>(part) * p.problem.heads_q + head] = total;
}
