// Tiles in shared memory as TMA writes them and wgmma reads them: panels of 64 columns, one behind the other.
#pragma once
#include "../common/ragged.cuh"
#include "config.cuh"

constexpr int kPanelColumns = 64;  // of 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;

// One box of a panel, from these rows on, in either kind of map.
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const MapRows& rows, int head) {
  tma_load_4d(target, &map, barrier, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void load_box(unsigned target, const TensorMap& map, unsigned barrier, int column,
                                         const RaggedMapRows& rows, int head) {
  tma_load_5d(target, &map, barrier, column, rows.first(), head, rows.last(), rows.outer());
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int column, const MapRows& rows,
                                          int head) {
  tma_store_4d(&map, source, column, rows.row, head, rows.batch);
}
__device__ __forceinline__ void store_box(const TensorMap& map, unsigned source, int column, const RaggedMapRows& rows,
                                          int head) {
  tma_store_5d(&map, source, column, rows.first(), head, rows.last(), rows.outer());
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
      if (kBoxes > 1 && from.row <= -kBoxRows) from.row = kPastTheEnd;
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
