"""The self-test finds wrong results, prints how to repeat them, and passes right ones."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.__main__ import main
from cuflash.errors import UnsupportedError
from cuflash.testing import layouts
from cuflash.testing.cases import Case
from cuflash.testing.dense import Dense, Merge
from cuflash.testing.exact import Chosen, Counted
from cuflash.testing.memory import FILL, GUARD, GuardedMemory
from cuflash.testing.oracle import MismatchError
from cuflash.testing.varlen import Append, ModDense, ModVarlen, Several, maker_of
from cuflash.tools import selftest as run

FORWARD, BACKWARD, LSE, BLOCK_MASK = cuflash.forward, cuflash.backward, cuflash.lse, cuflash.create_block_mask


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "why_no_gpu", lambda: "a test asks for it")


def first_of(kind: type, fits: Any = lambda trial: True) -> int:
    """Returns the index of the first trial of seed 0 of this kind with many rows and keys for which `fits` is true."""
    for number in range(4000):
        trial, _ = run.trial_of(0, number)
        if isinstance(trial, kind) and is_large(trial) and fits(trial):
            return number
    raise AssertionError(f"no such {kind.__name__} is ever drawn")


def is_large(trial: Any) -> bool:
    if isinstance(trial, Append):
        return trial.arguments["new"] == 5 and trial.arguments["place"] == "rows"
    problem = trial.problem if isinstance(trial, Several) else trial.case
    lengths = (*problem.queries, *problem.keys) if isinstance(trial, Several) else (problem.seqlen_q, problem.seqlen_k)
    return min(lengths, default=0) > 32 and problem.window_size == (-1, -1) and problem.diagonal_offset is None


def selftest(*arguments: str) -> int:
    return main(["selftest", "--seed", "0", *arguments])


def test_what_is_right_passes(on_cpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--problems", "120", "--minutes", "20") == 0  # a busy machine takes several minutes
    output = capsys.readouterr().out
    assert "The NumPy path is checked, on the CPU: a test asks for it" in output
    assert re.search(r"\n120 problems are right \(.*\), 0 wrong, 0 refused as unsupported, in \d+ s\n", output)


@pytest.mark.slow(60)
@pytest.mark.gpu
@pytest.mark.parametrize("family", range(15))
def test_what_is_right_passes_on_a_gpu(cupy: Any, family: int) -> None:
    # One test for each family, as the kernels of a family compile for a minute or longer, one after the other.
    machine, right = run.Gpus(), 0
    for number in range(family * run.FAMILY, (family + 1) * run.FAMILY):
        with contextlib.suppress(UnsupportedError):
            machine.run(*run.trial_of(0, number))
            right += 1
    if not right:
        pytest.skip("this GPU supports none of them")


@pytest.mark.gpu
def test_the_command_runs_on_a_gpu(cupy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("--problems", str(run.FAMILY)) == 0
    assert ", 0 wrong, " in capsys.readouterr().out


def test_every_kind_is_drawn_with_all_that_it_takes() -> None:
    trials = [run.trial_of(0, number)[0] for number in range(4000)]
    assert {type(trial) for trial in trials} == set(run.KINDS)
    dense = [trial for trial in trials if isinstance(trial, Dense)]
    assert {name for trial in dense for name in trial.layouts} == set(layouts.LAYOUTS)
    assert {trial.forward["algorithm"] for trial in dense} == {"flash1", "flash2", "flashd", "standard"}
    assert {trial.case.dtype for trial in dense} == {"float16", "bfloat16", "float32"}
    layouts_k = {trial.problem.place_k for trial in trials if isinstance(trial, Several)}
    assert layouts_k == {"packed", "rectangle", "cache", "paged"}
    names = {name for trial in trials if isinstance(trial, ModDense | ModVarlen) for name in trial.names}
    assert {"alibi", "causal_document", "sinks", "dropout", "bias bhqk"} <= names


def is_blocked(trial: Any) -> bool:
    """Returns True if a call has a block mask, which needs a mask_mod."""
    case = trial.case if isinstance(trial, ModDense) else Case("lengths", 2, 5, 5, 2, 2, 8, 8, "float32")
    return trial.block_mask and "mask_mod" in maker_of(trial.names)(lambda x: x, case)


MISALIGNED = {"odd_start", "even_start"}
# Features of trials: the kinds of trials that may have each, and a test for it.
FEATURES: dict[str, tuple[tuple[type, ...], Any]] = {
    **{f"misaligned {name}": ((Dense,), lambda trial, n=n: trial.layouts[n] in MISALIGNED)
       for n, name in enumerate(("q", "k", "v", "dout"))},
    "misaligned out": ((Dense,), lambda trial: trial.out in MISALIGNED),
    "misaligned sequences": ((Several,), lambda trial: not trial.backward and trial.layout in MISALIGNED),
    "misaligned sequences of backward": ((Several,), lambda trial: trial.backward and trial.layout in MISALIGNED),
    **{f"misaligned {name} of append_kv": ((Append,), lambda trial, name=name: trial.layouts[name] in MISALIGNED)
       for name in ("k_cache", "v_cache", "k", "v", "q")},
    **{f"misaligned {name}": ((Dense, Several), lambda trial, n=n: trial.backward and trial.grads_out[n] in MISALIGNED)
       for n, name in enumerate(("dq", "dk", "dv"))},
    "some gradients alone": ((Dense,), lambda trial: trial.backward and any(trial.grads_out) > all(trial.grads_out)),
    "split_size": ((Dense, Several), lambda trial: "split_size" in trial.forward),
    "block mask": ((ModDense, ModVarlen), is_blocked),
    "wide heads": ((Dense, Several), lambda trial: max(dims_of(trial)) > 256),
    "wide heads of v alone": ((Dense, Several), lambda trial: dims_of(trial)[1] > 256 >= dims_of(trial)[0]),
    "wide heads of append_kv": ((Append,), lambda trial: max(trial.arguments["dims"]) > 256),
}  # fmt: skip


def dims_of(trial: Any) -> tuple[int, int]:
    return trial.problem.dims if isinstance(trial, Several) else (trial.case.head_dim, trial.case.head_dim_v)


@pytest.mark.parametrize("seed", range(3))
def test_every_feature_is_drawn_of_each_kind_that_has_it(seed: int) -> None:
    trials = [run.trial_of(seed, number)[0] for number in range(4000)]
    for name, (kinds, has_it) in FEATURES.items():
        for kind in kinds:
            assert any(has_it(trial) for trial in trials if isinstance(trial, kind)), f"{kind.__name__}: {name}"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_misaligned_layouts_begin_one_or_two_elements_late(dtype: str) -> None:
    x = np.zeros((2, 3, 2, 8), dtype)
    for name, elements in (("odd_start", 1), ("even_start", 2)):
        view = layouts.LAYOUTS[name](x)
        assert view.ctypes.data - view.base.ctypes.data == elements * x.itemsize
        assert not any(stride % 16 for stride in view.strides[:-1])


def test_a_number_is_the_same_trial_again() -> None:
    assert all(run.trial_of(7, number)[0] == run.trial_of(7, number)[0] for number in range(100))
    assert run.trial_of(7, 0)[0] != run.trial_of(8, 0)[0]


def by_a_tenth(*arguments: Any, **more: Any) -> Any:
    out, lse = FORWARD(*arguments, **more)
    out *= out.dtype.type(1.1)
    return out, lse


def without_the_first_key(q: Any, k: Any, v: Any, **more: Any) -> Any:
    k = k.copy()
    k[:, :1] = -k[:, :1]
    return FORWARD(q, k, v, **more)


def in_other_bits(*arguments: Any, **more: Any) -> Any:
    out, lse = FORWARD(*arguments, **more)
    lse += lse.dtype.type(2e-6) * np.random.default_rng().random(lse.shape).astype(lse.dtype)
    return out, lse


def over_its_input(q: Any, *arguments: Any, **more: Any) -> Any:
    results = FORWARD(q, *arguments, **more)
    q[:1, :1] = 0
    return results


def beside_out(*arguments: Any, out: Any = None, **more: Any) -> Any:
    results = FORWARD(*arguments, out=out, **more)
    if out is not None:
        out.base.ravel()[1] = 0
    return results


def is_given_out(trial: Dense) -> bool:
    return trial.out == "every_second"


def of_new_arrays(*arguments: Any, grads_out: Any = None, **more: Any) -> Any:
    return BACKWARD(*arguments, **more)


def beside_dk(*arguments: Any, grads_out: Any = None, **more: Any) -> Any:
    results = BACKWARD(*arguments, grads_out=grads_out, **more)
    if grads_out is not None:
        grads_out[1].base.ravel()[-1] = 0
    return results


def is_given_dk(trial: Any) -> bool:
    return bool(trial.backward) and trial.grads_out[1] in {"every_second", *MISALIGNED}


def is_given_all(trial: Any) -> bool:
    return bool(trial.backward) and all(trial.grads_out)


def of_other_cells(mask_mod: Any, *sizes: int, **more: Any) -> Any:
    block_mask = BLOCK_MASK(mask_mod, *sizes, **more)
    block_mask.cells[...] = 0
    return block_mask


@pytest.mark.parametrize(
    ("kind", "fits", "name", "wrong", "message"),
    [
        (Dense, None, "forward", by_a_tenth, "out: error"),
        (Dense, None, "forward", in_other_bits, "forward does not repeat"),
        (Dense, lambda trial: trial.layouts[0] == "dense", "forward", over_its_input, "changed an array that it reads"),
        (Dense, is_given_out, "forward", beside_out, "beside the elements of out"),
        (Dense, lambda trial: trial.backward, "backward", lambda *x, **more: BACKWARD(*x, **more)[::-1], "d[qv]"),
        (Dense, is_given_dk, "backward", of_new_arrays, "is not what was returned"),
        (Dense, is_given_dk, "backward", beside_dk, "beside the elements of a gradient"),
        (Several, is_given_all, "backward", of_new_arrays, "is not what was returned"),
        (ModDense, is_blocked, "create_block_mask", of_other_cells, "out: "),
        (Dense, None, "lse", lambda *x, **more: LSE(*x, **more) + 1, "lse: "),
        (Several, lambda trial: trial.backward is None, "forward", by_a_tenth, "out: |forward does not"),
        (ModDense, None, "forward", by_a_tenth, "out: error"),
        (Chosen, None, "forward", without_the_first_key, "out differs in"),
        (Counted, None, "lse", lambda *x, **more: LSE(*x, **more) + 0.5, "sees more or fewer keys"),
        (Append, None, "append_kv", lambda **more: None, "caches or rows|returns"),
        (Merge, None, "merge_states", lambda outs, lses: (outs[0], lses[0] + 1), "out: |lse: "),
    ],
)
def test_what_is_wrong_is_found_and_can_be_repeated(
    kind: type, fits: Any, name: str, wrong: Any, message: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    number = first_of(kind, fits or (lambda trial: True))
    run.trial_of(0, number)[0].run(np)
    monkeypatch.setattr(cuflash, name, wrong)
    with pytest.raises(MismatchError, match=message):
        selftest("--only", str(number))
    capsys.readouterr()
    monkeypatch.setattr(run, "_numbers", lambda options: iter([number]))
    assert selftest() == 1
    shown = capsys.readouterr()
    assert "0 problems are right (), 1 wrong" in shown.out
    assert f"Wrong: {run.trial_of(0, number)[0]}" in shown.err
    assert f"Repeat it: python -m cuflash selftest --seed 0 --only {number}" in shown.err


def test_it_ends_after_a_few_wrong_results(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "trial_of", lambda seed, number: (Broken(), None))
    assert selftest() == 1
    assert f"{run.MOST_FAILURES} wrong" in capsys.readouterr().out


def test_what_is_not_supported_is_counted_and_nothing_at_all_is_no_success(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "trial_of", lambda seed, number: (Broken(cuflash.UnsupportedError("no")), None))
    assert selftest("--problems", "3") == 1
    assert "0 problems are right (), 0 wrong, 3 refused" in capsys.readouterr().out


class Broken:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or RuntimeError("an illegal memory access was encountered")

    def run(self, xp: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    "wrong", [["--minutes", "0"], ["--minutes", "nan"], ["--seed", "-1"], ["--only", "x"], ["--problems", "1.5"]]
)
def test_numbers_that_make_no_sense_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["selftest", *wrong])
    assert f"argument {wrong[0]}: {wrong[1]!r}: give a " in capsys.readouterr().err


class Pointer:
    """A stand-in for CuPy's pointers in host memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def memset_async(self, value: int, size: int, stream: Any) -> None:
        self.memory[:size] = value

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.memory[offset:])


class Memory:
    """A stand-in for CuPy's memory allocation, and for its array."""

    def __init__(self) -> None:
        self.cuda, self.current = self, None

    def get_current_stream(self) -> None:
        return None

    def MemoryPool(self) -> Memory:  # noqa: N802, for it is CuPy's name
        return self

    def malloc(self, size: int) -> Pointer:
        return Pointer(np.zeros(size + 7, "u1"))  # a pool may allocate more bytes than requested

    def ndarray(self, shape: tuple[int], dtype: str, memptr: Pointer) -> Any:
        self.current = memptr.memory[: shape[0]]
        return self

    def get(self) -> Any:
        return self.current


@pytest.mark.parametrize("offset", [-1, -GUARD, 100, 100 + GUARD - 1])
def test_memory_beside_an_array_is_looked_at(offset: int) -> None:
    memory = GuardedMemory(Memory())
    arrays = [memory._allocate(100) for _ in range(3)]
    assert all((array.memory[:100] == FILL).all() for array in arrays)
    arrays[1].memory[:100] = 5
    memory.check()
    whole, _ = memory._allocations[1]
    whole.memory[GUARD + offset] = 0
    with pytest.raises(MismatchError, match=f"wrote {'before' if offset < 0 else 'behind'} an array of 100 bytes"):
        memory.check()
    memory.forget()
    memory.check()


@pytest.mark.gpu
def test_gpu_memory_is_guarded(cupy: Any) -> None:
    memory = GuardedMemory(cupy)
    with memory.active():
        x = cupy.empty(33, "float32")
        assert bool(cupy.isnan(x).all())
        x[...] = 1
        memory.check()
        beside = cupy.ndarray((34,), "float32", memptr=x.data)
        beside[33] = 1
        with pytest.raises(MismatchError, match="behind an array of 132 bytes"):
            memory.check()


def test_a_view_tells_whether_memory_beside_its_elements_was_written() -> None:
    view = layouts.every_second(np.zeros((1, 2, 3, 4)))
    assert layouts.is_clean_beside(view)
    view.base.ravel()[1] = 0
    assert not layouts.is_clean_beside(view)
