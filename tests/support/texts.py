"""CUDA text of expression graphs in tests: run on the CPU, compared with the graph, compiled by NVRTC."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from expressions import ARRAYS, SCORE, points
from workers import ROOT, output_of

from cuflash.mods.codegen.cuda import print_struct
from cuflash.mods.graph.derivative import differentiate
from cuflash.mods.graph.graph import CapturedArray, Node
from cuflash.mods.graph.operations import Type
from cuflash.mods.graph.simplify import constant, load
from cuflash.mods.tracing.trace import trace
from cuflash.reference.evaluate import evaluate

KERNELS = ROOT / "kernels_cu"
INPUTS = ("b", "h", "seqlen_q", "seqlen_k", "q_idx", "k_idx")
TYPES = {"b": Type.BOOL, "f": Type.FLOAT32, "V": Type.FLOAT32, "i": Type.INT32, "u": Type.INT32}
COLUMNS = 16  # columns of the tiles in which points are computed

# Definitions that CUDA has and C++ lacks.
SHIM = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
using std::max;
using std::min;
enum class DType { kFloat16, kBFloat16, kFloat32 };
constexpr DType kDType = DType::kFloat32;
template <class T> T __ldg(const T* pointer) { return *pointer; }
template <class T> T load_or_zero(const T* from, bool exists) { return exists ? *from : T(0); }
inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float min_nan_f32(float x, float y) { return x != x ? x : y != y || y < x ? y : x; }
inline float max_nan_f32(float x, float y) { return x != x ? x : y != y || y > x ? y : x; }
inline float tanh_approx_f32(float x) { return tanhf(x); }
inline float cvt_f32_f16(unsigned short bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = std::ldexp(exponent ? 1024.0f + fraction : 1.0f * fraction, std::max(exponent, 1) - 25);
  return bits >> 15 ? -size : size;
}
"""
CALL = """
extern "C" void run_{name}(const void* captured, int count, const int (*at)[6], const float* score, double* out) {{
  using Mod = {name}<{short}>;
  const Mod::Arrays& arrays = *static_cast<const Mod::Arrays*>(captured);
  for (int i = 0; i < count; ++i) {{
    const int column = at[i][5] % {columns};
    const Mod::Head head = Mod::head(arrays, at[i][0], at[i][1], at[i][2], at[i][3], 1.0f);
    const Mod::Row row = Mod::row(arrays, head, at[i][4], at[i][5] - column);
    const Mod::Pair pair = Mod::pair(arrays, row, column & ~1);
    const Mod::Result result = Mod::element(arrays, head, row, pair, score[i], column);
    {stores}
  }}
}}
"""


def captured(array: Any) -> CapturedArray:
    wide = array.dtype.kind in "iu" and (array.dtype.itemsize == 8 or array.dtype == np.uint32)
    return CapturedArray(array, array.dtype.name, array.shape, Type.INT64 if wide else TYPES[array.dtype.kind])


def element(array: Any, number: int, *indices: Node | int) -> Node:
    """Returns an element of a captured array."""
    nodes = [each if isinstance(each, Node) else constant(each) for each in indices]
    return load(number, captured(array).type, nodes)


class Case(NamedTuple):
    """Nodes, and the arrays from which they load."""

    roots: Sequence[Node]
    arrays: Sequence[Any] = ARRAYS
    is_exact: bool = False
    runs: Mapping[tuple[int, int], bool] = MappingProxyType({})

    def text(self, name: str = "Mod") -> str:
        results = [f"result{number}" for number in range(len(self.roots))]
        arrays = [captured(each) for each in self.arrays]
        return print_struct(self.roots, arrays, name, results, results if self.is_exact else (), self.runs)


def case_of(function: Any, kind: str = "mask_mod") -> Case:
    """Returns the case of a traced function."""
    graph = trace(function, kind)
    return Case([graph.root], [each.array for each in graph.arrays], is_exact=kind == "mask_mod")


def packed(arrays: Sequence[Any]) -> bytes:
    """Returns the bytes of the struct of captured arrays."""
    parts = []
    for each in arrays:
        strides, extents = [n // each.itemsize for n in each.strides] or [0], list(each.shape) or [1]
        parts.append(struct.pack(f"Q{len(strides)}q{len(extents)}i0q", each.ctypes.data, *strides, *extents))
    return b"".join(parts)


def on_the_cpu(header: str, program: str, folder: Path, level: str = "-O0") -> ctypes.CDLL:
    """Returns the library of a C++ program in which a header of kernels_cu/common replaces HEADER."""
    if shutil.which("g++") is None or not KERNELS.is_dir():
        pytest.skip("needs g++ and a checkout")
    text = re.sub(r"#(include|pragma) .*", "", (KERNELS / "common" / header).read_text("utf-8"))
    source, library = folder / "program.cpp", folder / "program.so"
    source.write_text(SHIM + program.replace("HEADER", text), "utf-8")
    output_of("g++", "-std=c++17", level, "-w", "-shared", "-fPIC", "-o", str(library), str(source))
    return ctypes.CDLL(str(library))


def computed(cases: Sequence[Case], inputs: dict[str, Any], folder: Path, short: bool = True) -> list[list[Any]]:
    """Returns the values of the texts on the CPU, for every case and root."""
    lines: list[str] = []
    for number, case in enumerate(cases):
        name, roots = f"Mod{number}", range(len(case.roots))
        stores = " ".join(
            f"out[i * {len(roots)} + {root}] = static_cast<double>(result.result{root});" for root in roots
        )
        lines += [case.text(name), CALL.format(name=name, short=str(short).lower(), columns=COLUMNS, stores=stores)]
    loaded = on_the_cpu("mod_functions.cuh", "HEADER\n" + "\n".join(lines), folder)
    score = np.asarray(inputs["score"], np.float32)
    indices = np.stack([np.broadcast_to(inputs[name], score.shape) for name in INPUTS], axis=1).astype(np.int32)
    values = []
    for number, case in enumerate(cases):
        out = np.empty((len(score), len(case.roots)))
        addresses = (each.ctypes.data_as(ctypes.c_void_p) for each in (indices, score, out))
        loaded[f"run_Mod{number}"](packed(case.arrays), len(score), *addresses)
        values.append(list(out.T))
    return values


def check_equal(values: Any, expected: Any, name: str = "", rtol: float = 0.0, signs: bool = False) -> None:
    """Checks that values are equal up to a relative error. signs: True to check signs of zeros, too."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        expected = np.ravel(expected).astype(np.float64)
    np.testing.assert_allclose(values, expected, rtol=rtol, err_msg=name)
    if signs:
        is_number = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(values)[is_number], np.signbit(expected)[is_number], err_msg=name)


def check_values(
    cases: Mapping[str, tuple[Case, Any]],
    inputs: dict[str, Any],
    folder: Path,
    rtol: float = 0.0,
    signs: bool = False,
) -> None:
    """Checks that the text of each case has these values of its root on the CPU; reports all cases that differ."""
    differing = []
    results = computed([case for case, _ in cases.values()], inputs, folder)
    for (name, (_, expected)), (values,) in zip(cases.items(), results, strict=True):
        try:
            check_equal(values, expected, name, rtol, signs)
        except AssertionError as error:
            differing.append(str(error))
    assert not differing, "\n".join(differing)


def check(cases: Sequence[Case], folder: Path, inputs: dict[str, Any] | None = None, short: bool = True) -> None:
    """Checks that the texts have the values of the graphs, up to a few times the error of rounding."""
    inputs = points() if inputs is None else inputs
    inputs = inputs | {"score": np.asarray(inputs["score"], np.float32)}
    for case, results in zip(cases, computed(cases, inputs, folder, short), strict=True):
        pairs = [evaluate(case.roots, inputs, case.arrays, kind) for kind in (np.float32, np.float64)]
        for root, result, single, double in zip(case.roots, results, *pairs, strict=True):
            single, double = (np.broadcast_to(each, result.shape).astype(np.float64) for each in (single, double))
            if root.type != Type.FLOAT32:
                np.testing.assert_array_equal(result, single, err_msg=repr(root))
                continue
            np.testing.assert_array_equal(np.isnan(result), np.isnan(single), err_msg=repr(root))
            with np.errstate(invalid="ignore"):
                room = 1e-5 + 1e-5 * np.abs(double) + 8 * np.abs(single - double)
                is_near = (result == single) | np.isnan(single) | (np.abs(result - double) <= room)
            assert is_near.all(), (root, case.text(), result[~is_near], single[~is_near])


def with_derivative(case: Case) -> Case:
    root = case.roots[0]
    slope = differentiate(root).get(SCORE) if root.type == Type.FLOAT32 else None
    return case if slope is None else Case([root, slope], case.arrays)


def compiled(cases: Sequence[Case], arch: str) -> None:
    """Compiles the texts with NVRTC in an unrolled loop; raises an error if this fails."""
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    names = ("DTYPE", "OUT_DTYPE", "WARPS", "SMEM_BYTES", "PARAMS_BYTES")
    lines = ['#include "common/mod_functions.cuh"']
    for number, case in enumerate(cases):
        total = " + ".join(f"static_cast<float>(result.result{root})" for root in range(len(case.roots)))
        lines += [case.text(f"Mod{number}"), KERNEL.format(name=f"Mod{number}", total=total)]
    try:
        program = nvrtc.createProgram("\n".join(lines), "mods.cu", (), ())
    except Exception as error:
        pytest.skip(f"needs NVRTC: {error}")
    options = [f"-arch={arch}", "-std=c++17", f"-I{KERNELS}", *(f"-DCUFLASH_{name}=1" for name in names)]
    try:
        nvrtc.compileProgram(program, tuple(options))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program)[:4000])
    finally:
        nvrtc.destroyProgram(program)


KERNEL = """
extern "C" __global__ void kernel_{name}({name}<true>::Arrays arrays, float* scores) {{
  using Mod = {name}<true>;
  const Mod::Head head = Mod::head(arrays, blockIdx.x, blockIdx.y, gridDim.x, gridDim.y, 1.0f);
  const Mod::Row row = Mod::row(arrays, head, threadIdx.x, 8 * blockIdx.z);
#pragma unroll
  for (int column = 0; column < 4; ++column) {{
    const Mod::Pair pair = Mod::pair(arrays, row, column & ~1);
    const Mod::Result result = Mod::element(arrays, head, row, pair, scores[4 * threadIdx.x + column], column);
    scores[4 * threadIdx.x + column] = {total};
  }}
}}
"""
