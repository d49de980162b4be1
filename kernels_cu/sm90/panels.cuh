// Tiles in shared memory as TMA writes them and wgmma reads them: panels of 64 columns, one behind the other.
#pragma once
#include "../ptx/tma.cuh"
#include "config.cuh"

constexpr int kPanelColumns = 64;  // of 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;

// Begins to load the panels of a tile, whose first row has the coordinate `row`. One thread calls. A panel comes by
// kBoxes copies of kBoxRows rows each. why more than one: tiles of different heights then share a tensor map.
template <int kPanels, int kBoxes = 1, int kBoxRows = 0>
__device__ __forceinline__ void load_panels(const TensorMap& map, unsigned target, unsigned panel_bytes,
                                            unsigned barrier, int row, int head, int batch) {
  constexpr int kPastTheEnd = 1 << 30;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      // why: no document says whether a copy may lie before the first row altogether. After the last row it may.
      const int from = row + box * kBoxRows;
      tma_load_4d(target + panel * panel_bytes + box * kBoxRows * 128, &map, barrier, panel * kPanelColumns,
                  kBoxes == 1 || from > -kBoxRows ? from : kPastTheEnd, head, batch);
    }
  }
}

// Begins to store panels, in the bulk group at hand. One thread calls.
template <int kPanels>
__device__ __forceinline__ void store_panels(const TensorMap& map, unsigned source, unsigned panel_bytes, int column,
                                             int row, int head, int batch) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    tma_store_4d(&map, source + panel * panel_bytes, column + panel * kPanelColumns, row, head, batch);
  }
}
