"""The shape of the tree: floors, sizes, names and what an import costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from variants import variants

import cuflash
from cuflash.variant import DTYPE_CODES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, KERNELS = ROOT / "cuflash", ROOT / "kernels_cu"
if not KERNELS.is_dir():
    pytest.skip("needs a checkout", allow_module_level=True)

# A module or package of cuflash imports lower floors only.
FLOORS = {
    0: ("errors", "log", "driver"),
    1: ("mask", "device", "counters"),
    2: ("problem", "tiles_sm80", "tiles_sm90"),
    3: ("variant", "reference", "tensor_map"),
    4: ("plan_backward", "interop"),
    5: ("plan", "jit", "params"),
    6: ("launch", "host"),
    7: ("forward", "backward", "lse", "merge", "planner"),
    8: ("__init__",),
    9: ("frameworks", "info", "warmup"),
    10: ("bench",),
    11: ("__main__",),
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
# A module without a test file of its own stem, and the file that tests it.
TESTED_ELSEWHERE = {
    "device": ("test_plan", "test_bad_input"),
    "tiles_sm80": ("test_plan", "test_compile"),
    "variant": ("test_plan", "test_compile"),
    "plan": ("test_plan", "test_plan_sm90"),
    "planner": ("test_plan", "test_plan_backward"),
    "host": ("test_bad_input", "test_interop"),
    "reference": ("test_reference",),
}
TOP_LEVEL = {"pyproject.toml", "README.md", "cuflash", "kernels_cu", "tests", "examples", "LICENSE", "CHANGELOG.md"}
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh"))
INCLUDE = re.compile(r"^\s*#\s*include\s+(\S+)", re.MULTILINE)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def component(path: Path) -> str:
    """The module or package of cuflash that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The modules and packages of cuflash that a file imports, anywhere in it."""
    inside = ["cuflash", *path.relative_to(PACKAGE).parts[:-1]]
    names = {component(module) for module in MODULES}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        found: list[list[str]] = []
        if isinstance(node, ast.Import):
            found = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            found = [[*base, alias.name] for alias in node.names]
        for parts in found:
            if parts[0] == "cuflash":
                yield parts[1] if len(parts) > 1 and parts[1] in names else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_a_module_imports_lower_floors_only(path: Path) -> None:
    own = component(path)
    assert own in FLOOR_OF, f"{own} has no floor: give it one here and on the page of the architecture"
    for name in set(imports(path)) - {own}:
        assert FLOOR_OF[name] < FLOOR_OF[own], f"{short(path)} imports {name}"


def test_the_floors_are_of_modules_that_exist_and_the_reader_of_imports_sees_them() -> None:
    assert {component(path) for path in MODULES} == set(FLOOR_OF)
    assert set(imports(PACKAGE / "plan.py")) >= {"tiles_sm80", "device", "errors", "problem"}
    assert set(imports(PACKAGE / "bench" / "cases.py")) >= {"problem", "mask"}
    assert set(imports(PACKAGE / "forward.py")) >= {"host", "reference", "launch"}


@pytest.mark.parametrize("name", sorted(name for name, floor in FLOOR_OF.items() if 1 <= floor <= 7))
def test_a_module_has_a_test_file(name: str) -> None:
    for test in TESTED_ELSEWHERE.get(name, (f"test_{name}",)):
        path = ROOT / "tests" / f"{test}.py"
        assert path.is_file()
        assert "def test_" in path.read_text("utf-8")


# Floors of kernels_cu: a source includes headers of its own folder and of lower floors.
KERNEL_FLOORS = {"ptx": 0, "common": 1, "sm80": 2, "sm90": 2, "portable": 2}


def included(path: Path) -> list[Path]:
    """What a CUDA source includes."""
    found = []
    for name in INCLUDE.findall(path.read_text("utf-8")):
        assert name[0] == name[-1] == '"', f"{short(path)} includes {name}: no header of the system is used"
        found.append((path.parent / name.strip('"')).resolve())
    return found


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_a_cuda_source_includes_lower_floors_only(path: Path) -> None:
    assert len(path.relative_to(KERNELS).parts) == 2
    own = path.parent.name
    assert own in KERNEL_FLOORS, f"{own} has no floor: give it one here and on the page of the architecture"
    assert path.suffix == ".cuh" or KERNEL_FLOORS[own] == 2
    for other in included(path):
        assert other.is_file()
        assert other.suffix == ".cuh"
        assert other.is_relative_to(KERNELS)
        if other.parent != path.parent:
            assert KERNEL_FLOORS[other.parent.name] < KERNEL_FLOORS[own], f"{short(path)} includes {short(other)}"
    if own == "ptx":
        assert not included(path)


def test_headers_include_each_other_in_one_direction_and_all_are_used() -> None:
    graph = {path: included(path) for path in SOURCES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    used = {other for others in graph.values() for other in others}
    assert {path for path in SOURCES if path.suffix == ".cuh"} == used
    assert all(path.read_text("utf-8").count("#pragma once") == (path.suffix == ".cuh") for path in SOURCES)


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".cu"], ids=short)
def test_a_kernel_file_has_one_entry_named_by_the_host(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count('extern "C"') == text.count("__global__") == text.count("CUFLASH_KERNEL(") == 1
    assert text.startswith("//"), "a kernel begins with its equations and roles"


def test_macros_are_read_in_one_place_and_are_those_that_the_host_gives() -> None:
    code = {path: re.sub(r"//.*", "", path.read_text("utf-8")) for path in SOURCES}
    read = {path: set(re.findall(r"\bCUFLASH_(\w+)", text)) for path, text in code.items()}
    config = KERNELS / "common" / "config.cuh"
    for path, names in read.items():
        if path != config:
            assert names == ({"KERNEL"} if path.suffix == ".cu" else set()), short(path)
    given = {(variant.source.split("/")[0], variant.op): set(variant.constants) for variant in variants("sm_90")}
    assert read[config] | {"KERNEL"} == set().union(*given.values())
    # What a kernel is given beyond the common macros stands in groups: those of tiles, those of the tiles of one family
    # each, and those of blocks of keys.
    common, mma, keyed = given["portable", "merge"], given["sm80", "forward"], given["sm80", "backward"]
    wgmma = given["sm90", "forward"]
    assert common == given["portable", "delta"] == given["portable", "convert"]
    assert mma == given["sm80", "lse"] == given["sm80", "backward_dq"]
    assert keyed == given["sm80", "backward_dkdv"]
    assert wgmma == given["sm90", "lse"]
    tiled = mma & wgmma
    assert tiled > common
    for macro, names in (("HEAD_DIM", tiled - common), ("QK_UNROLL", mma - tiled), ("Q_STAGES", wgmma - tiled),
                         ("WARP_KEYS", keyed - mma)):  # fmt: skip
        group = code[config].split(f"#ifdef CUFLASH_{macro}\n")[1].split("#endif")[0]
        assert set(re.findall(r"\bCUFLASH_(\w+)", group)) == names
    for name, number in DTYPE_CODES.items():
        assert re.search(rf"k{name.replace('float', 'Float').replace('bF', 'BF')} = {number}\b", code[config])


def test_files_stay_small() -> None:
    for folder, most in (("cuflash", 400), ("kernels_cu", 400), ("tests", 400), ("examples", 100)):
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
        assert files
        long = {short(path): lines for path in files if (lines := len(path.read_text("utf-8").splitlines())) > most}
        assert not long, f"over {most} lines: {long}"


def test_the_top_level_holds_what_it_may() -> None:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {name.split("/")[0] for name in git.stdout.split("\0") if name}
    if git.returncode != 0 or "cuflash" not in tracked:
        pytest.skip("needs a git checkout")
    assert {name for name in tracked if not name.startswith(".")} <= TOP_LEVEL
    assert {"pyproject.toml", "README.md", "cuflash", "kernels_cu", "tests", "examples"} <= tracked


def test_importing_cuflash_imports_no_array_library_but_numpy() -> None:
    code = "import sys, cuflash; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"cuflash", "numpy"} <= loaded
    assert not loaded & {"cupy", "cupy_backends", "torch", "jax", "jaxlib", "ml_dtypes", "rich"}


def functions(path: Path) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Public functions and methods of a file, with whether they stand by themselves."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, True
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and (not inner.name.startswith("_") or inner.name == "__init__"):
                    yield inner, False


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_public_functions_are_typed_and_say_what_they_do(path: Path) -> None:
    if path.name not in ("__init__.py", "__main__.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8")))
    for function, alone in functions(path):
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        untyped = [a.arg for a in every if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        assert not untyped, f"{function.name}: {untyped}"
        assert function.returns is not None, function.name
        if alone:
            assert ast.get_docstring(function), function.name


def test_the_public_names_are_there_and_documented() -> None:
    for name in cuflash.__all__:
        assert getattr(cuflash, name).__doc__
    assert list(cuflash.__all__) == sorted(cuflash.__all__)
