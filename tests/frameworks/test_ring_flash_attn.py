"""The names of ring-flash-attention: signatures and results beside one process and beside the package itself."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from doctests import run_examples
from gloo_ranks import run_ranks
from workers import run_python

pytest.importorskip("torch")

from cuflash.frameworks import ring_flash_attn

SCRIPT = "ring_flash_attn_cases.py"
PACKAGE = find_spec("ring_flash_attn")
# Prints "name(signature)" of the package's functions; its adapters are read, as they need an older transformers.
SIGNATURES = """
import inspect
from ring_flash_attn_cases import real_package
module = real_package()
for name in dir(module):
    if callable(getattr(module, name)):
        print(name, *inspect.signature(getattr(module, name)).parameters.values(), sep="|")
"""


def run(ranks: int, folder: Path, check: str, *arguments: object) -> None:
    """Runs a check of the script on so many ranks."""
    text = run_ranks(SCRIPT, ranks, folder, check, *arguments)
    assert text.count(f"ran {check}") == ranks, text
    assert "differs" not in text, text


@pytest.mark.slow(30)
@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_calls_of_all_names_are_those_of_one_process(
    ranks: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run(ranks, tmp_path, "drawn", request.config.getoption("drawn") or 3)


@pytest.mark.slow(30)
@pytest.mark.skipif(PACKAGE is None, reason="needs ring-flash-attn")
@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn_calls_are_those_of_the_package(ranks: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run(ranks, tmp_path, "package", request.config.getoption("drawn") or 2)


@pytest.mark.parametrize("check", ["refusals", "other_bounds"])
def test_calls_of_two_ranks(check: str, tmp_path: Path) -> None:
    run(2, tmp_path, check)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_models_of_transformers_run_over_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="4.53")
    run(2, tmp_path, "model")


@pytest.mark.skipif(PACKAGE is None, reason="needs ring-flash-attn")
def test_names_and_signatures_are_those_of_the_package() -> None:
    text = run_python("-W", "ignore", "-c", SIGNATURES)
    package = {line.split("|")[0]: line.split("|")[1:] for line in text.splitlines()}
    adapters = "substitute_hf_flash_attn", "update_ring_flash_attn_params"
    assert set(package) | set(adapters) == set(ring_flash_attn.__all__)
    folder = Path((PACKAGE.submodule_search_locations or [""])[0] if PACKAGE else "")
    source = (folder / "adapters" / "hf_adapter.py").read_text("utf-8")
    for name in adapters:
        (parameters,) = re.findall(rf"^def {name}\(([^)]*)\)", source, re.MULTILINE)
        package[name] = [each.strip() for each in parameters.split(",") if each.strip()]

    def shown(parameters: list[str]) -> list[str]:
        return [re.sub(r":[^=]*|\s", "", each) for each in parameters]

    for name, parameters in package.items():
        mine = inspect.signature(getattr(ring_flash_attn, name)).parameters.values()
        assert shown([str(each) for each in mine]) == shown(parameters), name


@pytest.mark.parametrize("name", ring_flash_attn.__all__)
def test_each_name_is_described_and_examples_run(name: str) -> None:
    function = getattr(ring_flash_attn, name)
    text = inspect.getdoc(function) or ""
    parameters = list(inspect.signature(function).parameters)
    if "Parameters\n" in text:
        described = re.findall(r"^((?:\w+, )*\w+) : ", text.split("Returns\n---")[0].split("Raises\n---")[0], re.M)
        assert [one for each in described for one in each.split(", ")] == parameters
    else:  # one sentence refers to the function that takes the tensors by themselves, or in another order
        assert re.match(r"Computes `\w+_func`", text)
    if ">>>" in text:
        run_examples(function)
