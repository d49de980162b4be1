// Sequences of several lengths: what each is long, and where its rows lie, is read from arrays on the device, whose
// numbers are not trusted. Whatever they say, no address lies outside of the operands.
#pragma once
#include "config.cuh"
#include "sequence.cuh"

__device__ __forceinline__ int clamped(int number, int most) { return min(max(number, 0), most); }

// The part of the q axis that blocks of threads write for one sequence, used or not: all parts together are the axis.
// Rows before the first sequence and after the last one are the parts of the sequences -1 and `batch`, which are empty.
struct Territory {
  int sequence;
  int begin, end;  // rows of the second axis of q
  int block;       // of query blocks, counted from the part's last

  // The part of slot `slot` of query blocks of `size` rows, and its block, which may lie after the part's end. All lanes
  // of a warp ask together.
  __device__ static Territory of_slot(const ProblemParams& p, int slot, int size) {
    if (p.cu_seqlens_q == nullptr) {
      const int blocks = (p.rows_q + size - 1) / size, sequence = slot / blocks;
      return {sequence, 0, p.rows_q, (sequence + 1) * blocks - 1 - slot};
    }
    // Part i begins at slot bound(i) / size + i, so that it has a slot for each of its blocks, and at most one more.
    auto bound = [&](int i) {
      return i == 0 ? 0 : i > p.batch + 1 ? p.rows_q : clamped(p.cu_seqlens_q[i - 1], p.rows_q);
    };
    int part = 0, end = p.batch + 2;
    while (end - part > 1) {
      const int step = (end - part + 31) / 32, i = part + threadIdx.x % 32 * step;
      const bool is_before = i < end && bound(i) / size + i <= slot;
      part += max(__popc(__ballot_sync(0xffffffffu, is_before)) - 1, 0) * step;
      end = min(part + step, end);
    }
    const int first = bound(part), last = bound(part + 1), block = last / size + part - slot;
    // why: where cu_seqlens fall, the search finds any part, and no row may lie outside of it.
    if (block < 0 || last < first) return {-1, 0, 0, 0};
    return {part - 1, first, last, block};
  }
};

// The pages of a sequence. Key j lies in row j % size of page table[j / size]; keys of a page that is not there are not
// seen.
struct Pages {
  const int* table;  // null where keys do not lie in pages
  int size, count;   // keys of a page, and pages that there are

  __device__ __forceinline__ bool is_there(int page) const { return page >= 0 && page < count; }

  __device__ __forceinline__ bool has(int key) const { return is_there(table[key / size]); }

  // A key's row in an operand like k, where `first` is the same place in row 0 of page 0; null if its page is not there.
  __device__ __forceinline__ const char* row_of(const char* first, const Operand& x, int bytes, int key) const {
    const int page = table[key / size];
    if (!is_there(page)) return nullptr;
    return first + (page * x.stride_batch + key % size * x.stride_seqlen) * bytes;
  }

  // Whether a page of the keys `keys` is not there. All lanes of a warp ask together.
  __device__ __forceinline__ bool lacks_some(Range keys) const {
    bool lacks = false;
    for (int i = keys.begin / size + threadIdx.x % 32; i * size < keys.end; i += 32) lacks |= !is_there(table[i]);
    return __any_sync(0xffffffffu, lacks);
  }
};

// Where the rows of operands like k lie: one after the other, or in pages.
struct PagedPlace : Place {
  Pages pages;

  __device__ bool is_paged() const { return pages.table != nullptr; }
};

// What loads of key tiles hold of it. why not a copy: it is in shared memory, and is seldom asked.
struct KeyPlaceInMemory {
  static constexpr bool kMayBePaged = true;
  const PagedPlace& at;

  __device__ __forceinline__ char* address(const Operand& x, int bytes, int head, int row = 0, int column = 0) const {
    return at.address(x, bytes, head, row, column);
  }
};

// Query i sees key j if and only if i + mask_first <= j <= i + mask_last; kOpen is no bound. With mask_from_end, both
// bounds are counted from seqlen_k - seqlen_q.
struct RaggedSequence {
  static constexpr int kOpen = 0x80000000;  // why the least number: no bound that the host gives is as low

  using KeyPlace = KeyPlaceInMemory;
  using HeldMask = const Mask&;

  int heads_q, rows_q;
  Place q_place;
  PagedPlace k_place;
  int length_q, length_k;
  Mask seen;

  __device__ RaggedSequence(const ProblemParams& p, const Territory& at)
      : heads_q(p.heads_q), rows_q(p.rows_q), seen(0, 0, 0, 0) {
    const bool exists = at.sequence >= 0 && at.sequence < p.batch;
    const int b = exists ? at.sequence : 0;
    q_place = {p.cu_seqlens_q == nullptr ? b : 0, at.begin};
    length_q = exists ? min(at.end - at.begin, p.seqlen_q) : 0;
    k_place = {{b, 0}, {nullptr, 1, 0}};
    length_k = length_q > 0 ? min(p.rows_k, p.seqlen_k) : 0;
    if (length_q > 0) {
      if (p.seqused_q != nullptr) length_q = clamped(p.seqused_q[b], length_q);
      if (p.page_table != nullptr) {
        k_place = {{0, 0}, {p.page_table + b * p.page_table_stride, p.rows_k, p.batch_k}};
        length_k = p.seqlen_k;
      } else if (p.cu_seqlens_k != nullptr) {
        k_place = {{0, clamped(p.cu_seqlens_k[b], p.rows_k)}, {nullptr, 1, 0}};
        length_k = clamped(clamped(p.cu_seqlens_k[b + 1], p.rows_k) - k_place.begin, p.seqlen_k);
      } else if (p.cache_batch_idx != nullptr) {
        k_place.batch = p.cache_batch_idx[b];
        if (k_place.batch < 0 || k_place.batch >= p.batch_k) length_k = 0;
      }
      if (p.seqused_k != nullptr) length_k = clamped(p.seqused_k[b], length_k);
    }
    const int shift = p.mask_from_end ? length_k - length_q : 0;
    const int lo = p.mask_first == kOpen ? -length_q : p.mask_first + shift;
    const int hi = p.mask_last == kOpen ? length_k : p.mask_last + shift;
    seen = Mask(length_q, length_k, lo <= 1 - length_q ? -length_q : min(lo, length_k),
                hi >= length_k - 1 ? length_k : max(hi, -length_q));
  }

  __device__ int seqlen_q() const { return length_q; }
  __device__ int seqlen_k() const { return length_k; }
  __device__ const Mask& mask() const { return seen; }
  __device__ const Place& queries() const { return q_place; }
  __device__ KeyPlace keys() const { return {k_place}; }

  __device__ Range seen_keys() const {
    const Range keys = seen.key_range(0, length_q);
    return seen.lo <= seen.hi && keys.begin < keys.end ? keys : Range{0, 0};
  }

  // Numbers before query 0 of a query head in lse.
  __device__ long long lse_offset(int head) const {
    return (static_cast<long long>(q_place.batch) * heads_q + head) * rows_q + q_place.begin;
  }
};

// The sequences of a kernel that is compiled for both.
template <bool kOfSeveralLengths>
struct SequenceOf {
  using Type = Sequence;
};
template <>
struct SequenceOf<true> {
  using Type = RaggedSequence;
};
using AnySequence = SequenceOf<kLengths>::Type;
