// Tiles in shared memory as TMA writes them and wgmma reads them: panels of 64 columns, one behind the other.
#pragma once
#include "../../common/varlen.cuh"
#include "../config.cuh"

constexpr int kPanelColumns = 64;  // of 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;

// A box of `bytes` bytes in a varlen map, of an operand of so many columns. why it must be known whether it lies
// outside: a load then touches the first byte of the map, and at the beginning of a varlen map there may be no memory
// (L49).
struct VarlenBox : VarlenMapRows {
  int columns, bytes;

  __device__ constexpr VarlenBox from(int n) const { return {VarlenMapRows::from(n), columns, bytes}; }
  __device__ constexpr bool is_outside(int column) const { return row >= end || column >= columns; }
};

// What is loaded, as load_box wants it: boxes of so many rows of 128 bytes.
__device__ constexpr MapRows boxed(const MapRows& rows, int, int) { return rows; }
__device__ constexpr VarlenBox boxed(const VarlenMapRows& rows, int num_rows, int columns) {
  return {rows, columns, num_rows * 128};
}

// One box of a panel, from these rows on, in either kind of map.
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const MapRows& rows, int head) {
  tma_load_4d(target, &map, barrier, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const VarlenBox& box, int head) {
  __device__ static uint4 zeros[(kBlockK > 64 ? kBlockK : 64) * 128 / sizeof(uint4)];
  constexpr bool kOnce = kDecode;  // why: parameters, code and lengths stay in L2 for the next call
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

// Begins to load the panels of a tile, from these rows on. One thread calls. A panel comes by kBoxes copies of kBoxRows
// rows each. why more than one: tiles of different heights then share a tensor map.
template <int kPanels, int kBoxes = 1, int kBoxRows = 0, class Rows>
__device__ __forceinline__ void load_panels(const TensorMap& map, unsigned target, unsigned panel_bytes,
                                            unsigned barrier, const Rows& rows, int head) {
  constexpr int kPastTheEnd = 1 << 30;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      // why: no document says whether a copy may lie before the first row altogether. After the last row it may.
      Rows from = rows.from(box * kBoxRows);
      if (!kVarlen && kBoxes > 1 && from.row <= -kBoxRows) from.row = kPastTheEnd;
      load_box(target + panel * panel_bytes + box * kBoxRows * 128, map, barrier, panel * kPanelColumns, from, head);
    }
  }
}

// Begins to store panels, in the bulk group at hand. One thread calls.
template <int kPanels, class Rows>
__device__ __forceinline__ void store_panels(const TensorMap& map, unsigned source, unsigned panel_bytes, int column,
                                             const Rows& rows, int head) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    store_box(map, source + panel * panel_bytes, column + panel * kPanelColumns, rows, head);
  }
}
