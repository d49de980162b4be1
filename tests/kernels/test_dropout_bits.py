"""Dropped weights of the kernels' code, run on the CPU, equal the reference's for every layout of fragments."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from texts import on_the_cpu

from cuflash.problem.dropout import share_kept
from cuflash.reference.dropout import is_kept

# Lanes run one after the other, twice: values that they exchange in the first pass are available in the second.
PROGRAM = r"""
#define __forceinline__ inline
constexpr bool kDropout = true;
enum class IndexOffsets { kNone, kAligned, kAny };
constexpr IndexOffsets kIndexOffsets = IndexOffsets::KIND;
struct ModParams {
  int index_offsets[4];
  const unsigned* seed;
  int kept_share;
  float kept_scale;
};
struct LaneQueries {
  int upper;
  int operator[](int half) const { return upper + 8 * half; }
};
int lane_now, shuffle_now;
unsigned sent[32][4096];
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int step) {
  sent[lane_now][shuffle_now] = x;
  return sent[lane_now ^ step][shuffle_now++];
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
HEADER

// The kept weights of queries x keys from the first ones on, in tiles of 16 queries, or keys, by kCount / 2 of the
// others.
template <bool kAligned, int kCount>
void of_queries(const Dropout& dropout, int query, int key, float* out, bool by_bits) {
  for (int lane = 0; lane < 32; ++lane) {
    float weights[kCount];
    std::fill(weights, weights + kCount, 1.0f);
    const LaneQueries rows{query + lane / 4};
    if (by_bits) {
      const Kept<kCount> kept = dropout.kept<kAligned, kCount>(rows, key, lane % 4);
      for (int i = 0; i < kCount; ++i) weights[i] = kept.has(i);
    } else {
      dropout.drop<kAligned>(weights, rows, key, lane % 4);
    }
    for (int i = 0; i < kCount; ++i) {
      out[(lane / 4 + 8 * (i / 2 % 2)) * kCount * 2 + 8 * (i / 4) + lane % 4 * 2 + i % 2] = weights[i];
    }
  }
}

template <bool kAligned, int kFragments, int kCount>
void of_keys(const Dropout& dropout, int query, int key, float* out) {
  for (int turn = 0; turn < 2; ++turn) {
    for (lane_now = 0; lane_now < 32; ++lane_now) {
      const int lane = lane_now;
      shuffle_now = 0;
      Kept<kCount> kept[kFragments];
      dropout.kept_of_keys<kAligned>(kept, key, query, lane);
      for (int m = 0; m < kFragments; ++m) {
        for (int i = 0; i < kCount; ++i) {
          const int row = 16 * m + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
          out[column * 16 * kFragments + row] = kept[m].has(i);
        }
      }
    }
  }
}

void one_by_one(const Dropout& dropout, int query, int key, float* out) {
  for (int i = 0; i < 16 * 40; ++i) out[i] = dropout.keeps(query + i / 40, key + i % 40);
}

extern "C" void run(const unsigned* seed, int share, int sequence, int head, int query, int key, int way, float* out,
                    const int* offsets) {
  const ModParams own{{offsets[0], offsets[1], offsets[2], offsets[3]}, seed, share, 1.0f};
  const Dropout dropout(own, sequence, head);
  if (way < 2) of_queries<false, 24>(dropout, query, key, out, way);
  else if (way < 4) of_queries<true, 32>(dropout, query, key, out, way == 3);
  else if (way == 4) of_keys<false, 1, 8>(dropout, query, key, out);
  else if (way == 5) of_keys<true, 2, 64>(dropout, query, key, out);
  else if (way == 6) of_keys<false, 2, 16>(dropout, query, key, out);
  else if (way == 7) of_keys<true, 1, 16>(dropout, query, key, out);
  else one_by_one(dropout, query, key, out);
}
"""
# Queries and keys of a tile, and the alignment of its first key.
WAYS = [(16, 48, 16), (16, 48, 16), (16, 64, 32), (16, 64, 32), (16, 16, 16), (128, 32, 32), (32, 32, 16), (32, 16, 32),
        (16, 40, 1)]  # fmt: skip


# Offsets of query, key, head and sequence, by the kind of kernels that take them.
OFFSETS: dict[str, tuple[tuple[int, ...], ...]] = {
    "kNone": ((0, 0, 0, 0),),
    "kAligned": ((0, 0, 0, 0), (7, 32, 5, 9), (2**29, 2**29 + 96, 0, 1)),
    "kAny": (*((3, key, 1, 2) for key in range(33)), (2**29, 2**29 + 77, 0, 0)),
}


@pytest.fixture(scope="module", params=[*OFFSETS])
def run(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[str, Any]:
    program = PROGRAM.replace("KIND", request.param)
    folder = tmp_path_factory.mktemp(f"dropout_{request.param}")
    return request.param, on_the_cpu("dropout.cuh", program, folder, "-O1").run


@pytest.mark.parametrize("dropout_p", [0.0, 0.3, 0.99, 0.99999])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_fragments_keep_the_weights_of_the_reference(run: tuple[str, Any], way: int, dropout_p: float) -> None:
    queries, keys, step = WAYS[way]
    seed = 0xFEDCBA98_76543210
    words = (ctypes.c_uint32 * 2)(seed & 0xFFFFFFFF, seed >> 32)
    kind, call = run
    for sequence, head, query, key in ((0, 0, 0, 0), (3, 17, 16 * 5, 3 * step), (70000, 2, 2**30, 2**30 + 7 * step)):
        for offsets in OFFSETS[kind]:
            out = np.full((queries, keys), -1, np.float32)
            numbers = (ctypes.c_int * 4)(*offsets)
            call(words, share_kept(dropout_p), sequence, head, query, key, way, out.ctypes.data_as(ctypes.c_void_p),
                 numbers)  # fmt: skip
            q_idx, k_idx = query + np.arange(queries)[:, None] + offsets[0], key + np.arange(keys) + offsets[1]
            keep = is_kept(seed, dropout_p, sequence + offsets[3], head + offsets[2], q_idx, k_idx)
            np.testing.assert_array_equal(out, keep)
