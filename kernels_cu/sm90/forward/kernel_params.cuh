// The parameters of forward, lse and decode on Hopper.
#pragma once
#include "../../common/params.cuh"
#include "../../common/select.cuh"
#include "../config.cuh"

using KernelParams = WithMods<Select<kDecode, DecodeParams, Select<kVarlen, VarlenForwardParams, TiledForwardParams>>>;
static_assert(sizeof(KernelParams) == kParamsBytes, "the host packs other parameters");
