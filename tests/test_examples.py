"""Examples run as a user runs them, with and without a GPU; each exits with 1 if its result is wrong."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from workers import ROOT, run_python

import cuflash
from cuflash.planning import device
from cuflash.reference import flash1, flash2, flashd
from cuflash.testing import oracle

FOLDER = ROOT / "examples"
# The one runs no code of cuflash, and the other is no example.
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {FOLDER / "how_it_works.py", FOLDER / "packages.py"})
DRAWING = ("lineage", "long_context")  # they draw with --picture
MOD_EXAMPLES = ("alibi", "documents", "every_library", "pair_bias", "sinks")  # they call with score_mod and the like
if not EXAMPLES:
    pytest.skip("needs a checkout", allow_module_level=True)


@pytest.fixture(autouse=True)
def _import_as_scripts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)  # some examples import others


def imports(path: Path) -> list[str]:
    """Returns the packages that an example imports at its top, beside cuflash and NumPy, in their order."""
    pattern = r"^    (?:import|from) (torch|jax|transformers|matplotlib)\b"
    _, _, block = path.read_text("utf-8").partition("\nwith explain_missing():\n")
    return list(dict.fromkeys(re.findall(pattern, block.partition("\n\n\n")[0], re.MULTILINE)))


def need(path: Path, *of_jax: str) -> None:
    """Skips an example if a library that it imports is missing, or for JAX one of these packages."""
    imported = imports(path)
    for library in imported:
        pytest.importorskip(library)
    if "jax" in imported and of_jax and not any(map(importlib.util.find_spec, of_jax)):
        pytest.skip(f"needs one of {', '.join(of_jax)}")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_gpu(path: Path, tmp_path: Path) -> None:
    need(path)
    picture = tmp_path / "drawn.png"
    draws = path.stem in DRAWING and importlib.util.find_spec("matplotlib") is not None
    options = ("--picture", str(picture)) if draws else ()
    assert "on the CPU" in run_python(str(path), *options, CUDA_VISIBLE_DEVICES="", MPLBACKEND="Agg")
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


NEEDING = [path for path in sorted(FOLDER.glob("*.py")) if imports(path)]


def test_all_imports_of_packages_that_may_be_missing_are_explained() -> None:
    """Other modules import such packages only after a check that they are installed."""
    assert [path.stem for path in NEEDING] == [
        "context_parallel", "handover", "how_it_works", "jax_training", "torch_training", "transformers_generation",
    ]  # fmt: skip
    bare = r"^(?:import|from) (?:torch|jax|transformers|matplotlib|cupy|cuflash\.frameworks)\b"
    assert not [path.stem for path in FOLDER.glob("*.py") if re.search(bare, path.read_text("utf-8"), re.MULTILINE)]


@pytest.mark.parametrize("path", NEEDING, ids=lambda path: path.stem)
def test_an_example_names_missing_packages_and_their_installation(path: Path) -> None:
    for package in imports(path):
        code = f"import runpy, sys; sys.argv[0] = {path.name!r}; sys.path.insert(0, {str(FOLDER)!r}); import packages\n"
        code += f"{STAND_INS}hide({package!r}); runpy.run_path({str(path)!r}, run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        first = f"{path.name} needs {package}, which is not installed: pip install {package}"
        assert (done.returncode, done.stderr[: len(first)], done.stderr.count("\n")) == (1, first, 1), done.stderr


# Hides one package and fakes all others that examples import, so that the test needs none of them.
STAND_INS = """
from unittest.mock import MagicMock
def hide(package):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Finder())
    for other in {"torch", "jax", "transformers", "matplotlib"} - {package}:
        for name in (other, f"{other}.numpy", f"{other}.nn", f"{other}.patches"):
            sys.modules[name] = MagicMock(__version_info__=(9, 9, 9))
"""


def test_training_in_pytorch_prints_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    names = runpy.run_path(str(FOLDER / "torch_training.py"))
    for steps, expected in ((20, [*range(2, 21, 2)]), (3, [1, 2, 3])):
        names["train"]("ours", names["parameter"], "cpu", torch.float32, 4, steps)
        assert capsys.readouterr().out.splitlines() == [f"ours: {step} of {steps} steps" for step in expected]


@pytest.mark.parametrize("name", DRAWING)
def test_a_picture_without_matplotlib_is_refused_before_the_work(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--picture", "drawn.png"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == f"{name}.py needs matplotlib, which is not installed: pip install matplotlib"
    assert capsys.readouterr().out == ""


@pytest.mark.slow(60)
@pytest.mark.gpu
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_on_a_gpu(path: Path) -> None:
    need(path, "jax_cuda12_plugin", "jax_cuda13_plugin")
    where = "on the GPU"
    if path.stem == "context_parallel":  # each of its four ranks needs a GPU
        where = "4 ranks on 4 GPUs" if device.count() >= 4 else "4 ranks on the CPU"
    assert where in run_python(str(path), XLA_PYTHON_CLIENT_PREALLOCATE="false")


def train() -> dict[str, Any]:
    """Returns the names of examples/train.py."""
    return runpy.run_path(str(FOLDER / "train.py"))


def test_training_that_does_not_come_far_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    main = train()["main"]
    monkeypatch.setitem(main.__globals__, "find_library", lambda: np)
    assert main(steps=1) == 1


@pytest.mark.parametrize("count", [1, 20])
def test_log_probabilities_that_are_others_in_training_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    names = runpy.run_path(str(FOLDER / "decoder.py"))
    main, in_training = names["main"], names["in_training"]
    monkeypatch.setattr(cuflash, "plan", lambda *_, **__: SimpleNamespace(device="cpu"))
    assert main(count) == 0
    assert "bitwise" not in capsys.readouterr().out  # the CPU promises none
    monkeypatch.setitem(main.__globals__, "in_training", lambda *arguments: in_training(*arguments) + 1e-3)
    assert main(count) == 1


@pytest.mark.parametrize("path", [FOLDER / f"{name}.py" for name in MOD_EXAMPLES], ids=lambda path: path.stem)
def test_scores_and_masks_that_have_no_effect_are_a_failure(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    main = runpy.run_path(str(path))["main"]
    numpy = next(main.__globals__["libraries"]())
    monkeypatch.setitem(main.__globals__, "libraries", lambda: [numpy])
    assert main() == 0
    forward, ours = cuflash.forward, ("score_mod", "mask_mod", "block_mask", "bias", "sinks")

    def plain(*arrays: Any, **keywords: Any) -> Any:
        return forward(*arrays, **{name: value for name, value in keywords.items() if name not in ours})

    monkeypatch.setattr(cuflash, "forward", plain)
    assert main() == 1


def test_the_gradients_of_training_are_those_of_its_loss() -> None:
    """Along a gradient g the loss changes by |g|² a unit, measured for one weight at a time in float64."""
    names = train()
    rng = np.random.default_rng(0)
    x, target = (part.astype(np.float64) for part in names["sequences"](rng))
    width = names["HEADS"] * names["HEAD_DIM"]
    shapes = dict.fromkeys("qkv", (x.shape[2], width)) | {"o": (width, target.shape[2])}
    weights = {name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()}
    _, gradients = names["loss_and_gradients"](np, weights, x, target)
    for name, gradient in gradients.items():
        slopes = []
        for step in (1e-3 / np.linalg.norm(gradient), 2e-3 / np.linalg.norm(gradient)):
            moved = (weights | {name: weights[name] + way * step * gradient} for way in (1, -1))
            up, down = (names["loss_and_gradients"](np, each, x, target)[0] for each in moved)
            slopes.append(np.array((up - down) / (2 * step)))
        # A step twice as long errs four times as much, so the two slopes differ by more than the first errs.
        oracle.assert_close(name, np.sum(gradient**2), *slopes, ulps=4, unit=abs(up) / step)


@pytest.mark.filterwarnings("ignore:divide by zero")  # of states without visible keys
def test_a_state_of_the_lineage_that_is_not_updated_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    main = runpy.run_path(str(FOLDER / "lineage.py"))["main"]
    monkeypatch.setitem(main.__globals__, "on_a_gpu", lambda *arrays: ("CPU", arrays))
    monkeypatch.setattr("sys.argv", ["lineage.py"])
    assert main() == 0
    for algorithm in (flash1, flash2, flashd):
        with monkeypatch.context() as patch:
            patch.setattr(algorithm, "update", lambda state, tile: state)
            assert main() == 1


@pytest.mark.parametrize("fault", ["memory", "numbers"])
def test_flash_attention_that_does_not_go_on_is_a_failure(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    names = runpy.run_path(str(FOLDER / "long_context.py"))
    main, measured = names["main"], names["measured"]
    monkeypatch.setattr("sys.argv", ["long_context.py"])
    monkeypatch.setitem(main.__globals__, "find", lambda: "CPU")
    monkeypatch.setitem(main.__globals__, "LENGTHS", {"CPU": [512]})
    assert main() == 0

    def changed(where: str, call: Any) -> tuple[Any, float]:
        result, peak = measured(where, call)
        if call.keywords["algorithm"] == "standard":
            return result, peak
        return (None, float("nan")) if fault == "memory" else (result + 0.1, peak)

    monkeypatch.setitem(main.__globals__, "measured", changed)
    assert main() == 1
