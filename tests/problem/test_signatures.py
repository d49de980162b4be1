"""Types of the public calls, checked by mypy."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_overloads, get_type_hints

import pytest
from workers import ROOT

from cuflash.problem.options import Array

# mypy must report exactly the lines marked "error".
SNIPPET = """
from typing import Any, assert_type
import numpy as np
import cuflash
from cuflash.problem.options import options_key

A = np.ndarray[Any, np.dtype[np.float32]]

def calls(q: A, k: A, v: A, out: A, lse: A, flag: bool) -> None:
    assert_type(cuflash.forward(q, k, v, causal=True), A)
    assert_type(cuflash.forward(q, k, v, return_lse=False), A)
    assert_type(cuflash.forward(q, k, v, return_lse=True, out_dtype="float32"), tuple[A, A])
    assert_type(cuflash.forward(q, k, v, return_lse=flag, out_dtype=np.float32), A | tuple[A, A])
    assert_type(cuflash.lse(q, k, window_size=(3, None)), A)
    assert_type(cuflash.backward(q, q, k, v, out, lse, deterministic=True), tuple[A, A, A])
    assert_type(cuflash.backward(q, q, k, v, out, lse, captured_grads=(k,)), tuple[A, A, A, tuple[Any, ...]])
    grads = cuflash.backward(q, q, k, v, out, lse, captured_grads=(k,) if flag else None)
    assert_type(grads, tuple[A, A, A] | tuple[A, A, A, tuple[Any, ...]])
    assert_type(cuflash.merge_states([q, k], [lse, lse]), tuple[A, A])
    assert_type(cuflash.triangle_attention(q, k, v, bias=out), A)
    assert_type(cuflash.append_kv(q, q, k, v, lse, q=q, page_table=lse), A)
    cuflash.append_kv(q, q, k, v, lse, cache_batch_idx=lse)
    cuflash.plan(q, k, op="lse", dtype="float32", algorithm="flash1")
    cuflash.forward(q, k, v, algorithm="flash3")  # error
    cuflash.forward(q, k, v, out_dtype="float23")  # error
    cuflash.forward(q, k, v, casual=True)  # error
    cuflash.forward(q, k, v, softcap="20")  # error
    cuflash.backward(q, q, k, v, out, lse, page_tables=lse)  # error
    cuflash.plan(q, k, v, op="forwards")  # error
    cuflash.plan(q, k, v, is_causal=True)  # error
    cuflash.lse(q, k, is_causal=True)  # error
    cuflash.triangle_attention(q, k, v, out, scale=1.0)  # error
    cuflash.merge_states([q], [lse], v_a=q)  # error
    cuflash.create_block_mask(print, B=1, H=1, Q_LEN=1, KV_LEN=1)  # error
    cuflash.attention  # error
    options_key(softmax_scale=0.5, causal=True)
    options_key(softmax_scale=True, causal=0.5)  # error
    options_key(0.5, True)  # error
"""


def overloaded(module: str, name: str) -> Callable[..., Any]:
    pytest.importorskip(module.removeprefix("cuflash.frameworks."))
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        ("cuflash", "forward", 3),
        ("cuflash", "backward", 4),
        ("cuflash", "append_kv", 2),
        ("cuflash.frameworks.torch", "attention", 3),
        ("cuflash.frameworks.jax", "attention", 3),
    ],
)
def test_overloads_have_the_arguments_of_the_function(module: str, name: str, count: int) -> None:
    function = overloaded(module, name)
    expected = inspect.get_annotations(function, eval_str=True)
    expected.pop("foreign", None)
    overloads = get_overloads(function)
    assert len(overloads) == count
    for overload in overloads:
        hints = inspect.get_annotations(overload, eval_str=True)
        (options,) = get_args(hints.pop("options"))
        hints |= get_type_hints(getattr(options, "__origin__", options))
        assert hints.keys() == expected.keys()
        arrays = {argument for argument, hint in hints.items() if hint == Array | None}
        differ = {argument for argument, hint in hints.items() if hint != expected[argument]} - arrays
        assert differ <= {"return", "return_lse", "return_delta", "captured_grads", "q"}


def test_a_type_checker_sees_arrays_tuples_and_wrong_arguments(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy, which is in the lint extra")
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET, "utf-8")
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), str(snippet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = {int(number) for number in re.findall(r"snippet\.py:(\d+): error", done.stdout)}
    expected = {number for number, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# error")}
    assert errors == expected, done.stdout + done.stderr
