#!/usr/bin/env python3
"""Plants faults in copies of the tree, one at a time, and reports the faults that tests do not catch.

    .ci/faults.py             all faults, on all cores; faults of kernels only if there is a GPU
    .ci/faults.py mask        faults with this text in their name or file
    .ci/faults.py kernels_cu  faults of kernels; each compiles its kernel

A fault is caught if its tests fail or time out. It exits with 1 if a fault is not caught.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from cuflash.planning import device


class Fault(NamedTuple):
    """A fault in a file of cuflash/ or kernels_cu/: the text `right`, which occurs once, becomes `wrong`.

    tests: files of tests/, separated by spaces. only: an expression for pytest's -k that selects tests of these files.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: str
    only: str = ""

    @property
    def is_of_kernel(self) -> bool:
        return self.file.startswith(KERNELS)

    @property
    def path(self) -> str:
        return self.file if self.is_of_kernel else f"cuflash/{self.file}"


SECONDS = 400  # time limit of tests, for kernels that wait for ever
KERNELS = "kernels_cu/"
MASK, OPTIONS = "problem/mask.py", "problem/options.py"
FAULTS = (
    Fault("causal sees one key more", MASK, "right = 0", "right = 1", "problem/test_mask.py"),
    Fault("top-left by default", MASK, "seqlen_k - seqlen_q if diagonal_offset is None", "0 if diagonal_offset is None",
          "problem/test_mask.py"),
    Fault("a left bound is dropped too early", MASK, "if lo <= 1 - seqlen_q", "if lo <= 2 - seqlen_q",
          "problem/test_mask.py"),
    Fault("the last key of a range is lost", MASK, "row_end + self.hi)", "row_end - 1 + self.hi)",
          "problem/test_mask.py"),
    Fault("keys that one row alone sees need no mask", MASK, "row_end - 1 + self.lo", "row_begin + self.lo",
          "problem/test_mask.py"),
    Fault("the last row of a range is lost", MASK, "key_end - self.lo)", "key_end - 1 - self.lo)",
          "problem/test_mask.py"),
    Fault("a band from the end counts from the begin", MASK, "if band.from_end else 0", "if not band.from_end else 0",
          "problem/test_mask.py ops/test_mask_windows.py"),
    Fault("the scale is 1 / head_dim", OPTIONS, "1.0 / math.sqrt(context.head_dim)", "1.0 / context.head_dim",
          "problem/test_options.py problem/test_problem.py reference/test_forward.py"),
    Fault("the cap is not in units of q kᵀ", OPTIONS, "(softcap / scale, scale / softcap)", "(softcap, 1.0 / softcap)",
          "problem/test_options.py runtime/test_structs.py"),
    Fault("1 and True are the same argument", OPTIONS, "return self, *map(type, self),", "return self,",
          "problem/test_options.py problem/test_problem.py"),
    Fault("memory that repeats is written to", "problem/array_spec.py", "length > 1 and stride <= reach",
          "length > 1 and stride < reach", "ops/test_memory.py"),
    Fault("all weights but one share are kept", "problem/dropout.py", "round((1.0 - dropout_p) * SHARES)",
          "round(dropout_p * SHARES)", "reference/test_dropout.py problem/test_mod_spec.py"),
    Fault("blocks leave out the rest", "planning/plan.py", "return -(-length // step)", "return length // step",
          "planning"),
    Fault("packed rows have a slot too few", "problem/seqlen_info.py", "rows // size + batch + 2",
          "rows // size + batch", "planning problem/test_seqlen_info.py"),
    Fault("slices of v are not launched", "planning/forward.py", "num_q_blocks * num_slices * problem.heads_q *",
          "num_q_blocks * problem.heads_q *", "planning"),
    Fault("backward may add in any order", "planning/backward_sm80.py",
          "    deterministic = problem.options.deterministic", "    deterministic = False", "planning"),
    Fault("two constants share a name", "planning/variant.py", 'parts.append("softcap")', "pass",
          "planning/test_planner.py"),
    Fault("heads and head dims change places", "runtime/structs.py",
          "        problem.heads_q,\n        problem.heads_q // problem.heads_kv,",
          "        problem.heads_q // problem.heads_kv,\n        problem.heads_q,", "runtime/test_structs.py"),
    Fault("a tensor map has the stride of another axis", "runtime/tensor_map.py", "size * inner if heads > 1",
          "size * outer if heads > 1", "runtime/test_tensor_map.py"),
    Fault("an empty row of a map is judged", "runtime/tensor_map.py", "if box.end - box.begin > 1 else 16",
          "if box.end - box.begin > 0 else 16", "runtime/test_tensor_map.py"),
    Fault("a cubin is of any NVRTC", "runtime/compiler.py", "repr((options(variant), nvrtc_version()))",
          "repr(options(variant))", "runtime/test_compiler.py runtime/test_disk_cache.py"),
    Fault("a cubin is of any source", "runtime/compiler.py", ' + b"\\0" + path.read_bytes()', ' + b"\\0"',
          "runtime/test_compiler.py runtime/test_disk_cache.py"),
    Fault("a counter is of a handle", "runtime/device_memory.py",
          '_query("cuStreamGetId", stream, ctypes.c_ulonglong())', "stream", "runtime/test_device_memory.py"),
    Fault("tanh has another slope", "mods/graph/derivative.py", "constant(1.0), _times(node, node)",
          "constant(1.0), node",
          "mods/test_derivative.py"),
    Fault("the slope of a quotient has no sign", "mods/graph/derivative.py",
          "_negative(build(\"divide\", _times(adjoint, node), node.arguments[1]))",
          "build(\"divide\", _times(adjoint, node), node.arguments[1])", "mods/test_derivative.py"),
    Fault("a mask tile that is visible in part is full", "reference/block_mask.py", "np.where(all_visible, FULL,",
          "np.where(some, FULL,", "reference/test_block_mask.py"),
    Fault("a state that saw nothing is read", "reference/merge.py", "np.where(np.isneginf(lse)[..., None], 0, ",
          "np.where(np.isnan(lse)[..., None], 0, ", "ops/test_merge.py"),
    Fault("queries turn as their first key does", "reference/append.py", "(not problem.options.q_same_position)",
          "problem.options.q_same_position", "ops/test_append.py"),
    Fault("a used length is not clamped", "reference/sequences.py", "np.clip(used.astype(np.int64), 0, counts)",
          "np.maximum(used.astype(np.int64), 0)", "ops/test_sequences.py reference/test_sequences.py"),
    Fault("the used length of a cache is not clamped", "reference/append.py",
          "np.clip(named[\"seqused_k\"].astype(np.int64), 0, capacity)", "named[\"seqused_k\"].astype(np.int64)",
          "ops/test_append.py"),
    Fault("dropout drops by columns", "reference/dropout.py", "(4 * (k_idx // 32) + k_idx % 8 // 2, q_idx, h, b)",
          "(4 * (k_idx // 32) + k_idx % 8 // 2, q_idx, b, h)", "kernels/test_dropout_bits.py"),
    Fault("the gradient of lse has another sign", "reference/backward.py", "delta -= block", "delta += block",
          "reference/test_backward.py ops/test_backward.py"),
    Fault("NaN in a hidden row of v is met", "reference/tiles.py", "masked = None if is_finite else np.isneginf(s)",
          "masked = None", "reference/test_forward.py"),
    Fault("NaN in a row reaches keys that are hidden from it", "reference/backward.py",
          "visible_product(p.T, dout_rows, of_keys)", "p.T @ dout_rows", "reference/test_backward.py"),
    Fault("a masked tile shows one key more", "kernels_cu/common/mask.cuh", "? min(i + hi, seqlen_k - 1) : -1;",
          "? min(i + hi + 1, seqlen_k - 1) : -1;", "ops/test_forward.py", "float64_and_repeats and len65_causal"),
    Fault("the last keys of a block of rows are passed over", "kernels_cu/common/mask.cuh",
          "return {const_max(0, row_begin + lo), const_min(seqlen_k, row_end + hi)};",
          "return {const_max(0, row_begin + lo), const_min(seqlen_k, row_end - 1 + hi)};", "ops/test_forward.py",
          "float64_and_repeats and (len65_causal or len129_causal)"),
    Fault("sums of weights keep an older maximum", "kernels_cu/sm90/forward/softmax.cuh", "    sum[h] *= o_scale;\n",
          "", "ops/test_forward.py", "many_keys and head_dims0 and rising and bfloat16"),
    Fault("weights of float16 leave its range", "kernels_cu/sm90/forward/softmax.cuh", "kIsFloat16 ? 16384.0f : 0.125f",
          "kIsFloat16 ? 1e30f : 0.125f", "ops/test_forward.py", "many_keys and head_dims0 and rising and float16"),
    Fault("flash2 keeps sums of an older maximum", "kernels_cu/sm80/softmax_flash2.cuh",
          "sum[r] = sum[r] * o_scale[r] +", "sum[r] = sum[r] +", "ops/test_forward.py",
          "large_scores and float32 and rising and flash2"),
    Fault("scores are capped by another polynomial", "kernels_cu/common/score.cuh", "-0.33328159f",
          "-0.34f", "ops/test_forward.py", "softcap_of_any_size and bfloat16 and 30.0"),
    Fault("delta has the gradient of lse with another sign", "kernels_cu/portable/delta.cu",
          "nothing ? 0.0f : delta - dlse;", "nothing ? 0.0f : delta + dlse;",
          "ops/test_backward_gpu.py", "agrees_with_float64 and len128"),
    Fault("dk is not scaled", "kernels_cu/sm90/backward/epilogue.cuh",
          "params.dk_map, dk, params.problem.score.softmax_scale,", "params.dk_map, dk, 1.0f,",
          "ops/test_backward_gpu.py", "agrees_with_float64 and len128"),
    Fault("a state that saw nothing is blended", "kernels_cu/portable/merge.cu", "if (lse_i == -infinity()) continue;",
          "if (lse_i != lse_i) continue;", "ops/test_merge.py", "saw_nothing"),
    Fault("all queries turn as their first one", "kernels_cu/portable/append_kv.cu", "is_query && p.q_same_position ?",
          "is_query ?", "ops/test_append.py", "stand_at_their_keys"),
    Fault("weights are dropped by other heads", "kernels_cu/common/dropout.cuh",
          "pair, row, head, sequence}}", "pair, row, sequence, head}}",
          "kernels/test_dropout.py", "weights_that_stay and any_gpu and float16"),
    Fault("all sequences use as many keys as the first", "kernels_cu/common/varlen.cuh",
          "read_number(p.seqused_k + b)", "read_number(p.seqused_k)", "ops/test_decoding.py",
          "any_number_of_splits and own"),
    Fault("the count of splits is left behind", "kernels_cu/sm90/decode/epilogue.cuh",
          "if (is_last) params.arrivals[work.block] = 0;", "", "ops/test_decoding.py", "alike and own"),
    Fault("keys of pages that are not there are seen", "kernels_cu/sm90/forward/pages.cuh",
          "bool is_there = page_bits >>", "bool is_there = ~0u >>",
          "ops/test_sequences.py ops/test_decoding.py", "hides_its_own_keys or out_dtype_keeps"),
    Fault("a mask tile that is visible in part counts as full", "kernels_cu/portable/block_mask.cu",
          "if (any_visible && any_hidden) return kPartialTile;", "if (any_visible && any_hidden) return kFullTile;",
          "kernels/test_block_mask.py"),
)  # fmt: skip


def copied(to: Path) -> Path:
    """Copies the files that git tracks to a folder, and returns the folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes((ROOT / name).read_bytes())
    return to


def is_caught(fault: Fault, tree: Path) -> bool:
    """Returns True if tests fail or time out in this copy with the fault, and restores the copy."""
    path = tree / fault.path
    text = path.read_text("utf-8")
    if text.count(fault.right) != 1:
        raise SystemExit(f"{fault.file} has not one {fault.right!r}; mend the fault {fault.name!r} in this file")
    tests = [str(tree / "tests" / name) for name in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-k", fault.only] * bool(fault.only) + ["-m", "gpu"] * fault.is_of_kernel
    environment = os.environ | {"PYTHONPATH": str(tree), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    path.write_text(text.replace(fault.right, fault.wrong), "utf-8")
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, "utf-8")
    if done.returncode not in (0, 1):
        raise SystemExit(f"the tests of {fault.name!r} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.returncode == 1


def main() -> int:
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    faults = [fault for fault in FAULTS if pattern in f"{fault.name} {fault.path}"]
    if device.count() == 0:
        faults = [fault for fault in faults if not fault.is_of_kernel]
        print("faults in kernels are left out, as there is no GPU")
    here = threading.local()
    with tempfile.TemporaryDirectory() as folder:

        def prepare() -> None:
            here.tree = copied(Path(tempfile.mkdtemp(dir=folder)))

        with ThreadPoolExecutor(os.cpu_count(), initializer=prepare) as pool:
            results = list(pool.map(lambda fault: is_caught(fault, here.tree), faults))
    for fault, caught in zip(faults, results, strict=True):
        print(f"{'caught' if caught else 'NOT CAUGHT':<10}  {fault.path}: {fault.name}")
    print(f"{sum(results)} of {len(results)} faults were caught")
    return int(not all(results) or not results)


if __name__ == "__main__":
    sys.exit(main())
