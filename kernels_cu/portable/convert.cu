// convert: converts the accumulators of backward to gradients in the input dtype.
//
//   dq = softmax_scale * dq_acc
//   dk = softmax_scale * (sum of dk_acc over splits), dv = (sum of dv_acc over splits); only with splits
//
// Roles    A thread owns 8 columns of two rows that are 8 apart: 64 bytes of an accumulator (common/accumulators.cuh).
#include "../common/accumulators.cuh"
#include "../common/varlen.cuh"
#include "../common/vector.cuh"

static_assert(sizeof(ConvertParams) == kParamsBytes, "the host packs other parameters");

// Location of a strip of 16 accumulator rows: rows row … row + 15 of a sequence, which has num_rows written rows. Rows
// outside of `valid` have no visible pair, and become zeros.
template <bool kIsVarlen>
struct Strip {
  Place place;
  Range valid;
  int row, num_rows;

  __device__ Strip(const ProblemParams& problem, bool of_queries, int batch, int first_row) : row(first_row) {
    const Sequence sequence{problem, batch};
    place = of_queries ? sequence.queries() : sequence.keys();
    valid = of_queries ? sequence.visible_queries() : sequence.visible_keys();
    num_rows = of_queries ? sequence.seqlen_q() : sequence.seqlen_k();
  }
};

template <>
struct Strip<true> {
  Place place;
  Range valid;
  int row, num_rows;

  // All lanes of a warp call together, for the same strip.
  __device__ Strip(const ProblemParams& problem, bool of_queries, int, int padded_row) {
    const Axis axis = of_queries ? axis_of_queries(problem) : axis_of_keys(problem);
    const RowSlots at = RowSlots::of_slot(axis, padded_row / kPaddedSlot, kPaddedSlot);
    const VarlenSequence sequence(problem, at.sequence);
    place = of_queries ? sequence.q_place : static_cast<const Place&>(sequence.k_place);
    place.begin = at.begin;
    valid = of_queries ? sequence.visible_queries() : sequence.visible_keys();
    row = padded_row - at.first_slot * kPaddedSlot;
    num_rows = at.num_rows();
  }
};

// The conversion of one gradient. kRowsAreQueries: the gradient is dq, else dk or dv.
template <bool kRowsAreQueries>
struct Conversion {
  const ConvertParams& params;
  float* acc;  // null: there is nothing to convert
  const Operand& out;
  int columns, padded_columns;
  float scale;

  const ProblemParams& problem = params.problem;
  const int heads = kRowsAreQueries ? problem.heads_q : problem.heads_q / problem.heads_per_kv;
  const int splits = kRowsAreQueries ? 1 : params.splits;
  const int most_rows = kRowsAreQueries ? AnySequence::most_queries(problem) : AnySequence::most_keys(problem);
  const int strips = (most_rows + 15) / 16;

  __device__ long long num_threads() const {
    const long long batch = kVarlen ? 1 : problem.batch;  // varlen: a head has the rows of all sequences
    return acc == nullptr ? 0 : batch * heads * strips * padded_columns;
  }

  // `index` counts (batch, head, strip of 16 rows, fragment of 8 columns, row of the fragment), the last one fastest.
  __device__ void convert(long long index) const {
    const int g = index % 8, fragments = padded_columns / 8;
    const long long outer = index / 8 / fragments;
    const int fragment = static_cast<int>(index / 8 - outer * fragments), column = fragment * 8;
    const long long batch_head = outer / strips;
    const int strip = static_cast<int>(outer - batch_head * strips);
    if (!kVarlen && column >= columns) return;

    float x[2][8] = {};  // (row, column)
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      const float* const first = fragment_strip(acc, batch_head * splits + split, most_rows, strip, padded_columns);
      const float4* const source = reinterpret_cast<const float4*>(first + fragment * kFragmentFloats);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Either all four registers of lane 4 g + i, or register i of the lanes 4 g … 4 g + 3.
        const float4 y = source[(kFragmentByLane ? fragment_index(4 * g + i, 0) : fragment_index(4 * g, i)) / 4];
        const float words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int lane = kFragmentByLane ? i : e, reg = kFragmentByLane ? e : i;
          x[reg / 2][2 * lane + reg % 2] += words[e];
        }
      }
    }
    const Strip<kVarlen> at(problem, kRowsAreQueries, static_cast<int>(batch_head / heads), strip * 16);
    if (kVarlen && column >= columns) return;  // not earlier: the lanes of a warp search for their strip together
    constexpr int kBytes = kAccumulates ? 4 : kElementBytes;
    char* const gmem = at.place.address(out, kBytes, static_cast<int>(batch_head % heads));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + g + 8 * h;
      if (row >= at.num_rows) break;
      const bool is_valid = row >= at.valid.begin && row < at.valid.end;
      if constexpr (kAccumulates) {
        float* const sums = reinterpret_cast<float*>(gmem) + row * out.stride_seqlen + column;
#pragma unroll
        for (int c = 0; c < 8; ++c)
          if (is_valid && column + c < columns) sums[c] += x[h][c] * scale;
      } else {
#pragma unroll
        for (int c = 0; c < 8; c += kChunkElements) {
          Chunk<kDType> chunk;
#pragma unroll
          for (int e = 0; e < kChunkElements; e += 2) {
            chunk.set2(e, is_valid ? x[h][c + e] * scale : 0.0f, is_valid ? x[h][c + e + 1] * scale : 0.0f);
          }
          store_chunk(gmem + row * out.stride_seqlen * kElementBytes, column + c, columns - column - c, out.aligned,
                      chunk);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ ConvertParams p) {
  long long index = static_cast<long long>(blockIdx.x) * kNumThreads + threadIdx.x;
  const float scale = p.problem.score.softmax_scale;
  const Conversion<true> dq{p, p.dq_acc, p.dq, p.problem.head_dim, p.padded_dim, scale};
  const Conversion<false> dk{p, p.dk_acc, p.dk, p.problem.head_dim, p.padded_dim, scale};
  const Conversion<false> dv{p, p.dv_acc, p.dv, p.problem.head_dim_v, p.padded_dim_v, 1.0f};
  if (index < dq.num_threads()) dq.convert(index);
  else if ((index -= dq.num_threads()) < dk.num_threads()) dk.convert(index);
  else if ((index -= dk.num_threads()) < dv.num_threads()) dv.convert(index);
}
