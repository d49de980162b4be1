// Tiles in shared memory as TMA writes them and wgmma reads them: panels of 64 columns.
#pragma once
#include "../common/config.cuh"

constexpr bool kIsFloat16 = kDType == DType::kFloat16;
constexpr int kPanelColumns = 64;  // of 16-bit numbers: the 128 bytes of a swizzled row
constexpr int kPanelsQk = (kHeadDim + kPanelColumns - 1) / kPanelColumns;
constexpr int kPanelsV = (kHeadDimV + kPanelColumns - 1) / kPanelColumns;
