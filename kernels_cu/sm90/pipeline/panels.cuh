// Tiles in shared memory in the layout of TMA and wgmma: consecutive panels of 64 columns.
#pragma once
#include "../../common/varlen.cuh"
#include "../config.cuh"

constexpr int kPanelColumns = 64;  // 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;

// A TMA box of `bytes` bytes in a varlen map of an operand with `columns` columns. Boxes outside the map must not be
// loaded: TMA then touches the map's first byte, which may be unmapped memory (L49).
struct VarlenBox : VarlenMapRows {
  int columns, bytes;

  __device__ constexpr VarlenBox from(int n) const { return {VarlenMapRows::from(n), columns, bytes}; }
  __device__ constexpr bool is_outside(int column) const { return row >= end || column >= columns; }
};

// Rows in the form that load_box takes: boxes of num_rows rows of 128 bytes.
__device__ constexpr MapRows boxed(const MapRows& rows, int, int) { return rows; }
__device__ constexpr VarlenBox boxed(const VarlenMapRows& rows, int num_rows, int columns) {
  return {rows, columns, num_rows * 128};
}

// Issues the load of one box of a panel that begins at these rows, in a dense or a varlen map.
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const MapRows& rows, int head) {
  tma_load_4d(target, &map, barrier, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const VarlenBox& box, int head) {
  __device__ static uint4 zeros[(kBlockK > 64 ? kBlockK : 64) * 128 / sizeof(uint4)];
  constexpr bool kOnce = kDecode;  // evict k and v first, as parameters, code and lengths serve the next call
  if (box.is_outside(column)) bulk_load(target, zeros, box.bytes, barrier);
  else tma_load_5d<kOnce>(target, &map, barrier, column, box.first(), head, box.end, box.batch);
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int column, const MapRows& rows,
                                          int head) {
  tma_store_4d(&map, source, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int column, const VarlenMapRows& rows,
                                          int head) {
  tma_store_5d(&map, source, column, rows.first(), head, rows.end, rows.batch);
}

__device__ __forceinline__ void add_box(const TensorMap& map, unsigned source, int column, const MapRows& rows,
                                        int head) {
  tma_add_4d(&map, source, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void add_box(const TensorMap& map, unsigned source, int column, const VarlenMapRows& rows,
                                        int head) {
  tma_add_5d(&map, source, column, rows.first(), head, rows.end, rows.batch);
}

// Returns the rows of a box of kBoxRows rows. A box that lies before the map's first row moves past its last one: only
// the latter is documented.
template <int kBoxRows, class Rows>
__device__ __forceinline__ Rows not_before(Rows rows) {
  constexpr int kPastTheEnd = 1 << 30;
  if (rows.row <= -kBoxRows) rows.row = kPastTheEnd;
  return rows;
}

// Issues the loads of a tile's panels, from these rows on. One thread calls. A panel comes by kBoxes copies of kBoxRows
// rows, so that tiles of different heights share a tensor map.
template <int kPanels, int kBoxes = 1, int kBoxRows = 0, class Rows>
__device__ __forceinline__ void load_panels(const TensorMap& map, unsigned target, unsigned panel_bytes,
                                            unsigned barrier, const Rows& rows, int head) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      Rows from = rows.from(box * kBoxRows);
      if (!kVarlen && kBoxes > 1) from = not_before<kBoxRows>(from);
      load_box(target + panel * panel_bytes + box * kBoxRows * 128, map, barrier, panel * kPanelColumns, from, head);
    }
  }
}

// Issues the additions of panels of floats, 32 columns each, in the current bulk group. One thread calls. The copy
// engine skips columns past the map's.
template <int kColumns, class Rows>
__device__ __forceinline__ void add_panels(const TensorMap& map, unsigned source, unsigned panel_bytes, int column,
                                           const Rows& rows, int head) {
#pragma unroll
  for (int panel = 0; panel < (kColumns + 31) / 32; ++panel) {
    add_box(map, source + panel * panel_bytes, column + panel * 32, rows, head);
  }
}

// Issues the stores of panels in the current bulk group. One thread calls.
template <int kPanels, class Rows>
__device__ __forceinline__ void store_panels(const TensorMap& map, unsigned source, unsigned panel_bytes, int column,
                                             const Rows& rows, int head) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_box(map, source + panel * panel_bytes, column + panel * kPanelColumns, rows, head);
  }
}
