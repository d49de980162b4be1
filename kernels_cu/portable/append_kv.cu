// append_kv: writes new keys and values behind the used rows of a cache. It rotates keys at their positions, and
// queries into an output of their own. For row i of sequence b:
//
//   position = seqused_k[b] + i         page = page_table[b][position / page_size], or cache_batch_idx[b], or b
//   k_cache[page][position % page_size] = rotated k, v_cache[page][position % page_size] = v, q_out[i] = rotated q
//
//   x' = x cos − y sin   y' = x sin + y cos   for pair j of a row: (row[j], row[rotary_dim / 2 + j]) or, interleaved,
//   (row[2 j], row[2 j + 1]); cos and sin are the tables at [position][j]
//
// Values read from memory are not trusted: whatever they are, no address lies outside of the arrays.
//
// Roles    A thread owns a piece of one head of one new row: up to kChunkElements pairs (two chunks of 16 bytes), or
//          one chunk that is not rotated. Thread blocks of keys and values come first, thread blocks of queries after
//          them. All pieces of a row are consecutive: the heads of k, then the heads of v.
#include "../common/params.cuh"
#include "../common/vector.cuh"

static_assert(sizeof(AppendParams) == kParamsBytes, "the host packs other parameters");

__device__ __forceinline__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<unsigned long long>(pointer) % 16 == 0;
}

__device__ __forceinline__ char* address(const Operand& x, int batch, int row, int head) {
  const long long element = batch * x.stride_batch + row * x.stride_seqlen + head * x.stride_head;
  return static_cast<char*>(x.pointer) + element * kElementBytes;
}

// A new row: its location in its array, and its sequence and index there. Sequence -1: it belongs to none.
struct NewRow {
  int batch, row;
  int sequence, index;
};

// Returns row `number` of an array that has `rows` rows on its second axis.
__device__ __forceinline__ NewRow new_row(const int* cu_seqlens, int num_sequences, int rows, long long number) {
  if (cu_seqlens == nullptr) {
    const int batch = static_cast<int>(number / rows), row = static_cast<int>(number - batch * 1ll * rows);
    return {batch, row, batch, row};
  }
  // Binary search for the first sequence that ends behind the row; num_sequences if there is none.
  const int row = static_cast<int>(number);
  int sequence = 0, end = num_sequences;
  while (sequence < end) {
    const int middle = sequence + (end - sequence) / 2;
    if (cu_seqlens[middle + 1] > row) end = middle;
    else sequence = middle + 1;
  }
  const int begin = sequence < num_sequences ? max(cu_seqlens[sequence], 0) : row + 1;
  if (row < begin) return {0, row, -1, 0};
  return {0, row, sequence, row - begin};
}

// A piece of a row: both sides of some pairs, or one chunk that is not rotated. The row rotates `rotary_dim` elements.
struct Piece {
  int pair, pairs;                  // first pair and number of pairs; 0: the elements are not rotated
  int column, count;                // column and element count of the first chunk
  int second_column, second_count;  // column and element count of the second chunk
  bool in_chunks;                   // true if its chunks begin at multiples of 16 bytes of the row
  Chunk<kDType> first, second;

  __device__ __forceinline__ Piece(int index, int columns, int rotary_dim, bool interleaved) {
    const int half = rotary_dim / 2, num_rotated = (half + kChunkElements - 1) / kChunkElements;
    pair = index * kChunkElements;
    pairs = max(min(half - pair, kChunkElements), 0);
    if (pairs == 0) {
      column = rotary_dim + (index - num_rotated) * kChunkElements, count = columns - column;
      second_column = second_count = 0;
      in_chunks = rotary_dim % kChunkElements == 0;
    } else if (interleaved) {
      column = 2 * pair, count = 2 * pairs;
      second_column = column + kChunkElements, second_count = count - kChunkElements;
      in_chunks = true;
    } else {
      column = pair, count = pairs;
      second_column = half + pair, second_count = pairs;
      in_chunks = half % kChunkElements == 0;
    }
  }

  __device__ __forceinline__ void load(const char* row, bool aligned) {
    first = load_chunk<kDType>(row, column, count, aligned && in_chunks);
    second = load_chunk<kDType>(row, second_column, second_count, aligned && in_chunks);
  }

  __device__ __forceinline__ void store(char* row, bool aligned) const {
    store_chunk(row, column, count, aligned && in_chunks, first);
    store_chunk(row, second_column, second_count, aligned && in_chunks, second);
  }
};

// Returns a rotated pair. Not fused: NumPy does not fuse either, so all devices give the same bits.
__device__ __forceinline__ float2 rotated(float x, float y, float cos, float sin) {
  return make_float2(__fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin)), __fadd_rn(__fmul_rn(x, sin), __fmul_rn(y, cos)));
}

// Rotates the pairs of a piece. cos_row and sin_row are the table rows of its position, from pair 0 on.
template <bool kInterleaved, DType kTable>
__device__ __forceinline__ void rotate(Piece& piece, const char* cos_row, const char* sin_row) {
  constexpr int kStep = Chunk<kTable>::kElements;
  const bool cos_aligned = is_aligned(cos_row), sin_aligned = is_aligned(sin_row);
#pragma unroll
  for (int begin = 0; begin < kChunkElements; begin += kStep) {
    const int pair = piece.pair + begin, count = piece.pairs - begin;
    const Chunk<kTable> cos = load_chunk<kTable>(cos_row, pair, count, cos_aligned);
    const Chunk<kTable> sin = load_chunk<kTable>(sin_row, pair, count, sin_aligned);
#pragma unroll
    for (int i = 0; i < kStep; i += 2) {  // pairs j and j + 1 of the piece
      const int j = begin + i;
      if constexpr (kInterleaved) {
        Chunk<kDType>& chunk = 2 * j < kChunkElements ? piece.first : piece.second;
        const int e = 2 * j % kChunkElements;
        const float2 a = rotated(chunk.get(e), chunk.get(e + 1), cos.get(i), sin.get(i));
        const float2 b = rotated(chunk.get(e + 2), chunk.get(e + 3), cos.get(i + 1), sin.get(i + 1));
        chunk.set2(e, a.x, a.y), chunk.set2(e + 2, b.x, b.y);
      } else {
        const float2 a = rotated(piece.first.get(j), piece.second.get(j), cos.get(i), sin.get(i));
        const float2 b = rotated(piece.first.get(j + 1), piece.second.get(j + 1), cos.get(i + 1), sin.get(i + 1));
        piece.first.set2(j, a.x, b.x), piece.second.set2(j, a.y, b.y);
      }
    }
  }
}

template <DType kTable>
__device__ __forceinline__ void rotate_at(Piece& piece, int position, const AppendParams& p) {
  constexpr int kBytes = Chunk<kTable>::kBytes;
  const char* const cos_row = static_cast<const char*>(p.rotary_cos) + position * p.rotary_cos_stride * kBytes;
  const char* const sin_row = static_cast<const char*>(p.rotary_sin) + position * p.rotary_sin_stride * kBytes;
  if (p.interleaved) rotate<true, kTable>(piece, cos_row, sin_row);
  else rotate<false, kTable>(piece, cos_row, sin_row);
}

extern "C" __global__ void __launch_bounds__(kNumThreads) CUFLASH_KERNEL(const __grid_constant__ AppendParams p) {
  const bool is_query = blockIdx.x >= static_cast<unsigned>(p.num_key_blocks);
  const unsigned block = blockIdx.x - (is_query ? p.num_key_blocks : 0);
  const int* const cu_seqlens = is_query ? p.cu_seqlens_q : p.cu_seqlens_k;
  const int rows = is_query ? p.rows_q : p.rows_k, heads = is_query ? p.heads_q : p.heads_kv;
  const unsigned pieces_of_row = heads * (p.pieces + (is_query ? 0 : p.pieces_v));
  const long long thread = static_cast<long long>(block) * kNumThreads + threadIdx.x;
  const long long number = thread / pieces_of_row;
  if (number >= (cu_seqlens == nullptr ? static_cast<long long>(p.batch) * rows : rows)) return;

  // Splits the index into k, v or q, its head, and the piece of the head.
  unsigned index = static_cast<unsigned>(thread - number * pieces_of_row);
  const unsigned pieces_of_k = heads * p.pieces;
  const bool is_value = index >= pieces_of_k;
  if (is_value) index -= pieces_of_k;
  const unsigned pieces = is_value ? p.pieces_v : p.pieces, head = index / pieces;
  Piece piece(index - head * pieces, is_value ? p.head_dim_v : p.head_dim, is_value ? 0 : p.rotary_dim, p.interleaved);

  const NewRow at = new_row(cu_seqlens, p.batch, rows, number);
  const Operand& from = is_query ? p.q : is_value ? p.v : p.k;
  const Operand& to = is_query ? p.q_out : is_value ? p.v_cache : p.k_cache;
  if (at.sequence < 0) {
    if (is_query) {  // q_out is uninitialised
      piece.first = piece.second = Chunk<kDType>{};
      piece.store(address(to, at.batch, at.row, head), to.aligned);
    }
    return;
  }

  piece.load(address(from, at.batch, at.row, head), from.aligned);  // loaded first, to overlap with the next loads
  const int capacity = p.max_pages * p.page_size;
  const int used = min(max(p.seqused_k[at.sequence], 0), capacity);
  const int position = used + (is_query && p.q_same_position ? 0 : at.index);
  int batch = at.batch, row = at.row;
  if (!is_query) {
    if (position >= capacity) return;
    const int slot = position / p.page_size;
    batch = at.sequence, row = position - slot * p.page_size;
    if (p.page_table != nullptr) batch = p.page_table[at.sequence * p.page_table_stride + slot];
    else if (p.cache_batch_idx != nullptr) batch = p.cache_batch_idx[at.sequence];
    if (batch < 0 || batch >= p.num_pages) return;
  }
  if (piece.pairs > 0 && position < p.positions) {
    if (kDType == DType::kFloat32 || p.wide_table) rotate_at<DType::kFloat32>(piece, position, p);
    else rotate_at<kDType>(piece, position, p);
  }
  piece.store(address(to, batch, row, head), to.aligned);
}
