// The epilogue of forward on Hopper: normalised rows of o go through shared memory to out by TMA (L21). lse is stored
// directly. With kAccumulates, rows are blended into float32 rows in global memory instead.
#pragma once
#include "../../common/float_rows.cuh"
#include "mainloop.cuh"

constexpr int kOutColumns = 128 / kOutBytes;  // columns of a panel of out
constexpr int kPanelsOut = (kHeadDimV + kOutColumns - 1) / kOutColumns;

struct ForwardConsumer : ForwardMainloop<ForwardConsumer> {
  using ForwardMainloop::ForwardMainloop;

  // Stores the warp's rows of the previous work tile.
  __device__ __forceinline__ void store(const Softmax& softmax) {
    const QueryWork work = smem.work(i - 1);
    float lse[2];
    finish(work, softmax, o_scale, lse);
    if (__any_sync(0xffffffffu, o_scale[0] == 0.0f || o_scale[1] == 0.0f)) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (o_scale[h] == 0.0f) zero_row(o, h);
    }
    if constexpr (kAccumulates) {
      blend(params, work, lse);
      return;
    }
    // In dense kernels only the first lane computes the rows. In all lanes they would move other instructions, which
    // takes 2 % of capped calls at d 128 (L53).
    auto find_rows = [&] { return work.sequence(params.problem).out_from(work.row_begin + block_row()); };
    decltype(find_rows()) rows;
    if constexpr (kVarlen) rows = find_rows();
#pragma unroll
    for (int first = 0; first < kPanelsOut; first += kOutPanels) {
      const int last = min(first + kOutPanels, kPanelsOut);
      if (is_leader) bulk_wait_read<0>();
      __syncwarp();
      stage_rows(first, last);
      fence_proxy_async();
      __syncwarp();
      if (is_leader) {
        if constexpr (!kVarlen) rows = find_rows();
#pragma unroll
        for (int n = first; n < last; ++n) {
          store_box(params.out_map, out_smem(n - first), n * kOutColumns, rows, work.head);
        }
        bulk_commit();
      }
    }
    // lse is stored after the proxy fence, which would wait for these stores, too (L23).
    if (params.lse != nullptr) store_lse(work, lse);
  }

 private:
  // Blends this lane's rows into the state in out and lse. Rows without visible keys leave it unchanged.
  template <class AnyParams>
  __device__ __forceinline__ void blend(const AnyParams& p, const QueryWork& work, const float (&lse)[2]) const {
    const auto sequence = work.sequence(p.problem);
    const int row = work.row_begin + block_row() + fresh_thread() % 32 / 4;
    float* const states = p.lse + sequence.lse_offset(work.head) + row;
    bool changes[2];
    float state[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      changes[h] = lse[h] != -infinity() && row + 8 * h < sequence.seqlen_q();
      state[h] = changes[h] ? states[8 * h] : 0.0f;
    }
    __syncwarp();  // the lanes of a row have read its lse
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!changes[h]) continue;
      const Blend both(state[h], lse[h]);
      float* const to = float_row(p.out, sequence.out_from(row + 8 * h), work.head);
      both.out(to, o, h, o_scale[h], p.problem.head_dim_v, p.out.aligned);
      if (fresh_thread() % 4 == 0) states[8 * h] = both.lse;
    }
  }

  // Returns the address where the warp stages panel n of the panels stored together.
  __device__ __forceinline__ unsigned out_smem(int n) const {
    return smem.out + ((group * 4 + warp) * kOutPanels + n) * kWarpPanelBytes;
  }

  // Stages the warp's normalised rows of o in shared memory: panels first … last - 1.
  __device__ __forceinline__ void stage_rows(int first, int last) const {
    using Panel = Swizzle<8>;
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int column = first * kOutColumns; column < min(last * kOutColumns, kHeadDimV); column += 16) {
      const int j = column / 8;
      const unsigned panel = out_smem(column / kOutColumns - first);
      if constexpr (kOutBytes == 2) {
        auto pair = [&](int j, int h) {  // columns 8 j + 2 (lane % 4) and the next, of row h
          return pack2(o[4 * j + 2 * h] * o_scale[h], o[4 * j + 2 * h + 1] * o_scale[h]);
        };
        stmatrix_x4(Panel::advance(panel + Panel::offset(lane % 16, lane / 16), 0, column % kOutColumns / 8),
                    pair(j, 0), pair(j, 1), pair(j + 1, 0), pair(j + 1, 1));
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int h = n % 2, at = 4 * (j + n / 2) + 2 * h;
          st_shared_v2(panel + Panel::offset(lane / 4 + 8 * h, (j + n / 2) % 4 * 2 + lane % 4 / 2) + lane % 2 * 8,
                       __float_as_uint(o[at] * o_scale[h]), __float_as_uint(o[at + 1] * o_scale[h]));
        }
      }
    }
  }
};
