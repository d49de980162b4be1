// Variable-length sequences: lengths and locations are read from device arrays. Their values are not trusted: whatever
// they are, no address lies outside the operands.
#pragma once
#include "config.cuh"
#include "select.cuh"
#include "sequence.cuh"

__device__ __forceinline__ int clamped(int x, int most) { return min(max(x, 0), most); }

// Reads a length. With kReadsAhead past the L1 cache, which keeps values from before a kernel ahead wrote them (L55).
__device__ __forceinline__ int read_number(const int* at) {
  if constexpr (kReadsAhead) return __ldcg(at);
  return *at;
}

// The partition of one side's rows (q or k) into sequences.
struct Axis {
  const int* cu_seqlens;  // null: each sequence is one index of the first axis
  int rows;               // rows of the second axis
  int batch;

  // True if cu_seqlens do not decrease. All lanes of a warp call together.
  __device__ __forceinline__ bool is_in_order() const {
    bool falls = false;
    for (int i = threadIdx.x % 32; cu_seqlens != nullptr && i < batch; i += 32) falls |= bound(i + 2) < bound(i + 1);
    return !__any_sync(0xffffffffu, falls);
  }

  // Returns the begin of part i of the axis. Parts 1 … batch are the sequences; parts 0 and batch + 1 are the rows
  // before the first and after the last sequence. cu_seqlens is read unconditionally: a branch has more code (L50).
  __device__ __forceinline__ int bound(int part) const {
    const int read = clamped(cu_seqlens[clamped(part - 1, batch)], rows);
    return part < 1 ? 0 : part > batch + 1 ? rows : read;
  }

  // Returns the rows of an existing sequence.
  __device__ __forceinline__ Range rows_of(int number) const {
    return {clamped(cu_seqlens[number], rows), clamped(cu_seqlens[number + 1], rows)};
  }
};

__device__ __forceinline__ Axis axis_of_queries(const ProblemParams& p) { return {p.cu_seqlens_q, p.rows_q, p.batch}; }
__device__ __forceinline__ Axis axis_of_keys(const ProblemParams& p) { return {p.cu_seqlens_k, p.rows_k, p.batch}; }

// The rows that thread blocks write for one sequence, used or not. They are cut into blocks of `size` rows with one
// slot each. Part i begins at slot bound(i) / size + i, which gives it enough slots and at most one spare.
struct RowSlots {
  int sequence;    // -1, or `batch` or more, for rows outside of all sequences
  int begin, end;  // rows of the second axis
  int first_slot, num_slots;

  // Returns the rows and slots of the part that contains a slot of `size` rows; slots past the axis get no rows. All
  // lanes of a warp call together.
  __device__ static RowSlots of_slot(const Axis& axis, int slot, int size) {
    if (axis.cu_seqlens == nullptr) {
      const int blocks = (axis.rows + size - 1) / size, sequence = slot / blocks;
      return {sequence, 0, sequence < axis.batch ? axis.rows : 0, sequence * blocks, blocks};
    }
    auto first_slot = [&](int part) { return axis.bound(part) / size + part; };
    int part = 0, end = axis.batch + 2;
    while (end - part > 1) {
      const int step = (end - part + 31) / 32, i = part + threadIdx.x % 32 * step;
      const bool is_before = i < end && first_slot(i) <= slot;
      part += max(__popc(__ballot_sync(0xffffffffu, is_before)) - 1, 0) * step;
      end = min(part + step, end);
    }
    const int first = first_slot(part);
    const RowSlots found{part - 1, axis.bound(part), axis.bound(part + 1), first, first_slot(part + 1) - first};
    // With decreasing cu_seqlens the search may end at any part, and no row may lie outside of it.
    if (slot < first || slot >= first + found.num_slots || found.end < found.begin) return {-1, 0, 0, slot, 1};
    return found;
  }

  __device__ int num_rows() const { return end - begin; }

  // The first row of a slot, relative to `begin`: in ascending order of blocks, or descending.
  __device__ int row(int slot, int size) const { return (slot - first_slot) * size; }
  __device__ int row_from_end(int slot, int size) const { return (first_slot + num_slots - 1 - slot) * size; }
};

// Rows per slot of the per-row buffers beside the operands (lse and delta, sums of gradients): see RowSlots.
constexpr int kPaddedSlot = 128;

// The first row of a box in a tensor map of rank 5, which cuts boxes off at a sequence's end (L49). Its axes are
// (head_dim, rows, heads, rows + 1, batch); both row axes have the stride of a row, and the map begins `rows` rows
// before the operand. So a box at (rows + row - end, end) begins at `row`, and rows from `end` on are out of bounds.
// With end = 0 all rows are.
struct VarlenMapRows {
  int rows, row, end, batch;

  __device__ constexpr VarlenMapRows from(int n) const { return {rows, row + n, end, batch}; }

  __device__ constexpr int first() const { return rows + row - end; }
};

// The pages of a sequence. Key j lies in row j % size of page table[j / size]. Keys of missing pages are masked.
struct Pages {
  const int* table;  // null if keys are not paged
  int size, count;   // keys of a page, and number of pages

  __device__ __forceinline__ bool is_there(int page) const { return page >= 0 && page < count; }

  __device__ __forceinline__ bool has(int key) const { return is_there(table[key / size]); }

  // Returns a key's row in a k-like operand, or null if its page is missing. `first` is the same head and column in row
  // 0 of page 0.
  __device__ __forceinline__ const char* row_of(const char* first, const Operand& x, int bytes, int key) const {
    const int page = table[key / size];
    if (!is_there(page)) return nullptr;
    return first + (page * x.stride_batch + key % size * x.stride_seqlen) * bytes;
  }

  // True if a page of these keys is missing. All lanes of a warp call together.
  __device__ __forceinline__ bool lacks_some(Range keys) const {
    bool lacks = false;
    for (long long i = keys.begin / size + threadIdx.x % 32; i * size < keys.end; i += 32) lacks |= !is_there(table[i]);
    return __any_sync(0xffffffffu, lacks);
  }
};

// Location of the rows of k-like operands: consecutive rows, or pages.
struct PagedPlace : Place {
  Pages pages;

  __device__ bool is_paged() const { return pages.table != nullptr; }
};

// A reference to a PagedPlace in shared memory, for loads of key tiles; a copy would cost registers and is rarely read.
struct KeyPlaceInMemory {
  static constexpr bool kMayBePaged = true;
  const PagedPlace& at;

  __device__ __forceinline__ char* address(const Operand& x, int bytes, int head, int row = 0, int column = 0) const {
    return at.address(x, bytes, head, row, column);
  }
};

// A sequence of a varlen batch. Query i sees key j if and only if i + mask_first <= j <= i + mask_last; kOpen is no
// bound. With mask_from_end both bounds count from seqlen_k - seqlen_q.
struct VarlenSequence {
  static constexpr int kOpen = 0x80000000;  // the least int: no bound of the host is as low

  using KeyPlace = KeyPlaceInMemory;
  using HeldMask = const Mask&;

  int heads_q, rows_q;
  Place q_place;
  PagedPlace k_place;
  int length_q, length_k;
  Mask bounds;
  int padded_q, padded_k;  // first rows in slot-padded buffers

  // Reads sequence `number`; a number outside the batch gives a sequence without rows.
  __device__ VarlenSequence(const ProblemParams& p, int number)
      : VarlenSequence(p, number,
                       p.cu_seqlens_q != nullptr ? axis_of_queries(p).rows_of(existing(p, number)) : Range{}) {}

  // Reads sequence `number`, whose packed rows of q are known.
  __device__ VarlenSequence(const ProblemParams& p, int number, Range packed_q)
      : heads_q(p.heads_q), rows_q(p.rows_q), bounds(0, 0, 0, 0) {
    const bool exists = number >= 0 && number < p.batch;
    const int b = existing(p, number);
    length_q = exists ? p.rows_q : 0, length_k = exists ? p.rows_k : 0;
    q_place = {b, 0}, k_place = {{b, 0}, {nullptr, 1, 0}};
    padded_q = b * ((p.rows_q + kPaddedSlot - 1) / kPaddedSlot) * kPaddedSlot;
    padded_k = b * ((p.rows_k + kPaddedSlot - 1) / kPaddedSlot) * kPaddedSlot;
    if (exists) {
      if (p.cu_seqlens_q != nullptr) lay_packed(packed_q, b, q_place, length_q, padded_q);
      length_q = clamped(p.seqused_q != nullptr ? read_number(p.seqused_q + b) : length_q, min(length_q, p.seqlen_q));
      if (p.page_table != nullptr) {
        k_place = {{0, 0}, {p.page_table + b * p.page_table_stride, p.rows_k, p.batch_k}};
        length_k = p.seqlen_k;
      } else if (p.cu_seqlens_k != nullptr) {
        lay_packed(axis_of_keys(p).rows_of(b), b, k_place, length_k, padded_k);
      } else if (p.cache_batch_idx != nullptr) {
        k_place.batch = read_number(p.cache_batch_idx + b);
        if (k_place.batch < 0 || k_place.batch >= p.batch_k) length_k = 0;
      }
      length_k = clamped(p.seqused_k != nullptr ? read_number(p.seqused_k + b) : length_k, min(length_k, p.seqlen_k));
    }
    const int shift = p.mask_from_end ? length_k - length_q : 0;
    const int lo = p.mask_first == kOpen ? -length_q : p.mask_first + shift;
    const int hi = p.mask_last == kOpen ? length_k : p.mask_last + shift;
    bounds = Mask(length_q, length_k, lo <= 1 - length_q ? -length_q : min(lo, length_k),
                  hi >= length_k - 1 ? length_k : max(hi, -length_q));
  }

  __device__ int seqlen_q() const { return length_q; }
  __device__ int seqlen_k() const { return length_k; }
  __device__ const Mask& mask() const { return bounds; }
  __device__ const Place& queries() const { return q_place; }
  __device__ KeyPlace keys() const { return {k_place}; }

  __device__ Range visible_keys() const { return visible_or_none(bounds.key_range(0, length_q)); }
  __device__ Range visible_queries() const { return visible_or_none(bounds.row_range(0, length_k)); }

  // Slot-padded buffers have the slots of all sequences in each head, so heads are not counted over the batch.
  __device__ static int most_queries(const ProblemParams& p) { return p.padded_rows_q; }
  __device__ static int most_keys(const ProblemParams& p) { return p.padded_rows_k; }
  __device__ int padded_query(int row) const { return padded_q + row; }
  __device__ int query_strip(int row) const { return padded_query(row) / 16; }
  __device__ int key_strip(int row) const { return (padded_k + row) / 16; }
  __device__ long long query_head(int head) const { return head; }
  __device__ long long kv_head(int head) const { return head; }
  __device__ long long rows_offset(int head, int rows) const { return static_cast<long long>(head) * rows + padded_q; }

  // Returns the offset in lse of query 0 of a query head.
  __device__ long long lse_offset(int head) const {
    return (static_cast<long long>(q_place.batch) * heads_q + head) * rows_q + q_place.begin;
  }

 private:
  // Empty if a length is 0: the ranges of the mask are then meaningless.
  __device__ Range visible_or_none(Range range) const {
    const bool any = length_q > 0 && length_k > 0 && bounds.lo <= bounds.hi && range.begin < range.end;
    return any ? range : Range{0, 0};
  }

  __device__ static int existing(const ProblemParams& p, int number) {
    return number >= 0 && number < p.batch ? number : 0;
  }

  __device__ static void lay_packed(Range rows, int b, Place& place, int& length, int& padded) {
    place = {0, rows.begin};
    length = max(rows.end - rows.begin, 0);
    padded = (place.begin / kPaddedSlot + b + 1) * kPaddedSlot;
  }
};

// The sequence type of kernels that are compiled for both.
using AnySequence = Select<kVarlen, VarlenSequence, Sequence>;
