// The parameters of forward, lse and decode on Hopper.
#pragma once
#include "../../common/params.cuh"
#include "../../common/select.cuh"
#include "../config.cuh"

using DenseParams = WithMods<Select<kAccumulates, TiledForwardStateParams, TiledForwardParams>>;
using VarlenParams = WithMods<Select<kAccumulates, VarlenForwardStateParams, VarlenForwardParams>>;
using KernelParams = Select<kDecode, WithMods<DecodeParams>, Select<kVarlen, VarlenParams, DenseParams>>;
static_assert(sizeof(KernelParams) == kParamsBytes, "the host packs other parameters");
