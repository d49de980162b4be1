"""The wheel and the sdist: their content, and that every way of installing finds the CUDA sources. No network."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from workers import ROOT, need_checkout, output_of

from cuflash.errors import INSTALL_HINT

KERNELS = ROOT / "kernels_cu"
need_checkout("kernels_cu", "pyproject.toml")
for _module in ("build", "hatchling", "pip"):
    if find_spec(_module) is None:
        pytest.skip(f"needs {_module}: pip install -e .[test]", allow_module_level=True)
SOURCES = {path.relative_to(ROOT).as_posix() for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh")}
PARTS = (
    "cuflash",
    "kernels_cu",
    "tests",
    "examples",
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
WHERE = "import cuflash; from cuflash.runtime import compiler; print(cuflash.__file__); print(compiler.source_root())"


def run(*command: str, cwd: Path, **variables: str) -> str:
    """Runs a Python command without other checkouts; returns its output, which is the message if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return output_of(sys.executable, *command, cwd=cwd, env=environment | variables)


def located(folder: Path, **variables: str) -> tuple[Path, Path]:
    """Returns (package, source_root) of the cuflash that a process in this folder imports."""
    package, root = run("-c", WHERE, cwd=folder, **variables).split()
    return Path(package).parent, Path(root)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist of a copy of this checkout, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, checkout / name)
    run("-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), cwd=checkout)
    return folder


def one(folder: Path, pattern: str) -> Path:
    paths = list(folder.glob(pattern))
    assert len(paths) == 1, [path.name for path in folder.iterdir()]
    return paths[0]


def test_the_wheel_is_pure_small_and_carries_the_sources(built: Path) -> None:
    wheel = one(built / "dist", "*.whl")
    assert wheel.name.startswith("cuflash-")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 1_000_000
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"cuflash/{name}" for name in SOURCES} <= names
    assert {"cuflash/kernels_cu/common/config.cuh", "cuflash/py.typed", "cuflash/reference/flash2.py"} <= names
    outside = {name.split("/")[0] for name in names} - {"cuflash"}
    outside -= {"cuflash_sglang.py", "cuflash_vllm.py"}  # entry points of serving engines
    assert len(outside) == 1
    assert outside.pop().endswith(".dist-info")
    assert not [name for name in names if name.endswith((".pyc", ".so", ".cubin", ".csv"))]
    assert not [name for name in names if name.startswith("cuflash/") and name.endswith(".md")]


def test_the_wheel_asks_for_python_3_11_and_offers_the_extras(built: Path) -> None:
    archive = zipfile.ZipFile(one(built / "dist", "*.whl"))
    metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    for line in (
        "Name: cuflash",
        "Requires-Python: >=3.11",
        *(f"Provides-Extra: {x}" for x in ("cuda12", "cuda13", "bench", "lint", "test")),
    ):
        assert line in metadata.splitlines()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not [line for line in required if any(name in line for name in ("cupy", "torch", "jax", "nvidia"))]


def test_pre_commit_runs_the_versions_of_the_lint_extra() -> None:
    config = ROOT / ".pre-commit-config.yaml"
    if not config.is_file():
        pytest.skip("needs a checkout")
    pins = set(re.findall(r'additional_dependencies: \["(.*?)"\]', config.read_text("utf-8")))
    assert pins == {requirement for requirement in EXTRAS["lint"] if not requirement.startswith("mypy")}


def test_errors_advise_the_packages_of_the_extras() -> None:
    names = set(re.findall(r'"(.*?)"', INSTALL_HINT))
    of_both = {*EXTRAS["cuda12"], *EXTRAS["cuda13"]}
    assert names == {requirement for requirement in of_both if not requirement.startswith("numpy")}


def test_the_sdist_carries_sources_tests_and_examples(built: Path) -> None:
    with tarfile.open(one(built / "dist", "*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= SOURCES
    for folder in ("tests", "examples"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert files
        assert names >= files
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "cuflash/__init__.py", "cuflash/py.typed"}


def test_an_installed_wheel_finds_its_sources_inside_the_package(built: Path, tmp_path: Path) -> None:
    wheel, target = one(built / "dist", "*.whl"), tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)
    package, root = located(tmp_path, PYTHONPATH=str(target))
    assert package == target / "cuflash"
    assert root == target / "cuflash" / "kernels_cu"
    assert {f"kernels_cu/{path.relative_to(root).as_posix()}" for path in root.rglob("*.cu*")} == SOURCES


def test_a_checkout_finds_its_sources_beside_the_package(built: Path) -> None:
    checkout = built / "checkout"
    assert located(checkout) == (checkout / "cuflash", checkout / "kernels_cu")


def test_an_editable_install_finds_the_sources_of_the_checkout(built: Path, tmp_path: Path) -> None:
    pytest.importorskip("editables", reason="needs editables, which hatchling asks for")
    checkout, target = built / "checkout", tmp_path / "site"
    hook = "import sys; from hatchling.build import build_editable; print(build_editable(sys.argv[1]))"
    wheel = tmp_path / run("-c", hook, str(tmp_path), cwd=checkout).split()[-1]
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=tmp_path)
    # Its paths go first, as the environment of this test may have cuflash installed.
    first = f"import site, sys; old = list(sys.path); site.addsitedir({str(target)!r}); "
    start = first + f"sys.path[:] = [p for p in sys.path if p not in old] + old; {WHERE}"
    package, root = run("-c", start, cwd=tmp_path).split()
    assert (Path(package).parent, Path(root)) == (checkout / "cuflash", checkout / "kernels_cu")
    assert all((target / f"cuflash_{engine}.py").is_file() for engine in ("sglang", "vllm"))
