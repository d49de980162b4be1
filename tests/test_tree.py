"""The shape of the tree: layers, sizes, names and the cost of an import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from pages import CONTRIBUTING
from variants import variants
from workers import ROOT, need_checkout, run_python

import cuflash
from cuflash.problem.dtypes import DTYPES

PACKAGE, KERNELS = ROOT / "cuflash", ROOT / "kernels_cu"
need_checkout("kernels_cu")

# A folder or module of cuflash imports its own and lower layers; the longest dotted prefix of a module counts.
LAYERS = {
    0: ("errors", "interrupt", "locks", "log", "units", "arrays.__init__", "arrays.packages"),
    1: ("mods.graph",),
    2: ("mods.analysis",),
    3: ("mods.tracing", "mods.codegen"),
    4: ("mods",),
    5: ("problem",),
    6: ("arrays", "reference", "planning"),
    7: ("runtime",),
    8: ("ops",),
    9: ("__init__",),
    10: ("frameworks",),
    11: ("distributed",),
    12: ("frameworks.context_parallel", "frameworks.ring_flash_attn", "frameworks.transformers"),
    13: ("frameworks.torch.sdpa",),
    14: ("frameworks.sdpa",),
    15: ("testing",),
    16: ("tools",),
    17: ("__main__",),
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
# Test files of modules that have neither test_<module>.py nor test_<subfolder>_<module>.py in tests/<folder>; a folder
# stands for all of its modules.
TESTED_ELSEWHERE = {
    "arrays": "arrays/test_arrays.py",
    "tools": "tools/test_bench.py",
    "testing": "testing/test_selftest.py",
    **dict.fromkeys((f"reference/{name}" for name in ("flash1", "flash2", "flashd", "merge", "standard", "tiles")),
                    "reference/test_forward.py"),
    **dict.fromkeys((f"planning/{name}" for name in ("device", "forward", "hopper", "merge", "plan", "tile",
                    "variant")), "planning/test_planner.py"),
    "planning/tile_shapes_sm90": "planning/test_tiles_sm90.py",
    **dict.fromkeys((f"planning/backward_{family}" for family in ("sm80", "sm90")), "planning/test_backward.py"),
    "mods/tracing/stand_ins": "mods/test_capture.py",
    **dict.fromkeys((f"mods/tracing/{name}" for name in ("operand", "array_tracer")), "mods/test_tracers.py"),
    "mods/graph/operations": "mods/test_simplify.py",
    "mods/graph/linear": "mods/test_affine.py",
    "mods/codegen/scalars": "mods/test_cuda.py",
    **dict.fromkeys((f"mods/graph/{name}" for name in ("extents", "float_ranges", "precision")), "mods/test_exact.py"),
    "reference/append": "ops/test_append.py",
    **dict.fromkeys((f"problem/{name}" for name in ("array_spec", "dtypes", "operands")), "problem/test_problem.py"),
    "problem/checks": "problem/test_bad_input.py",
    "problem/dropout": "problem/test_mod_spec.py",
    "problem/mod_arrays": "ops/test_mods_refused.py",
    **dict.fromkeys((f"runtime/{name}" for name in ("call", "call_cache")), "runtime/test_call.py"),
    "runtime/cpu": "problem/test_bad_input.py",
    "frameworks/bool_masks": "frameworks/test_transformers_masks.py",
    **dict.fromkeys((f"frameworks/flash_attn/{name}" for name in ("arguments", "v2", "v3")),
                    "frameworks/test_flash_attn.py"),
    **dict.fromkeys((f"frameworks/ring_flash_attn/{name}" for name in ("adapters", "call", "rows")),
                    "frameworks/test_ring_flash_attn.py"),
    **dict.fromkeys((f"distributed/jax/{name}" for name in ("call", "gather", "ring", "ulysses")),
                    "distributed/test_jax.py"),
    **dict.fromkeys((f"frameworks/sglang/{name}" for name in ("backend", "checks", "metadata", "plugin")),
                    "frameworks/test_sglang.py"),
    "frameworks/flash_attn/kvcache": "frameworks/test_flash_attn_cache.py",
    "frameworks/flash_attn/v2_private": "frameworks/test_flash_attn_private.py",
    "frameworks/flash_attn/v3_private": "frameworks/test_flash_attn_3_private.py",
    "frameworks/flash_attn/v4": "frameworks/test_flash_attn_4_interface.py",
    "frameworks/jax/mod_attributes": "frameworks/test_jax_mods.py",
    "frameworks/jax/partition": "frameworks/test_xla_partition.py",
    **dict.fromkeys((f"frameworks/jax/{name}" for name in ("arguments", "autograd", "call")), "frameworks/test_jax.py"),
    **dict.fromkeys((f"frameworks/jax/{name}" for name in ("ffi", "handlers", "primitives")), "frameworks/test_xla.py"),
    **dict.fromkeys((f"distributed/{name}" for name in ("calls", "choice", "exchange", "gather", "ops", "ring",
                    "scheme", "torch", "ulysses")),
                    "distributed/test_schemes.py"),
    **dict.fromkeys(("distributed/regions", "frameworks/transformers/in_region"),
                    "frameworks/test_transformers_region.py"),
    "mods/operations": "ops/test_block_mask.py",
    "frameworks/torch/autograd": "frameworks/test_torch_func.py",
    "frameworks/torch/sdpa_masks": "frameworks/test_sdpa.py",
    "frameworks/torch/tensors": "frameworks/test_torch.py",
    "frameworks/torch/varlen": "frameworks/test_torch_sequences.py",
    "frameworks/transformers/mask_mod": "frameworks/test_transformers_masks.py",
    "frameworks/transformers/masks": "frameworks/test_transformers_packed.py",
    **dict.fromkeys((f"frameworks/vllm/{name}" for name in ("backend", "implementation", "metadata")),
                    "frameworks/test_vllm.py"),
    **dict.fromkeys((f"frameworks/flash_attn{name}_interface" for name in ("", "_3")), "frameworks/test_flash_attn.py"),
}  # fmt: skip
TOP_LEVEL = {"pyproject.toml", "README.md", "cuflash", "kernels_cu", "tests", "examples", "LICENSE", "CHANGELOG.md"}
NAMES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
SOURCES = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh"))
INCLUDE = re.compile(r"^\s*#\s*include\s+(\S+)", re.MULTILINE)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imports(path: Path) -> set[str]:
    """Returns the modules of cuflash that a file imports, anywhere in it, such as `problem/mask`."""
    inside = ["cuflash", *path.relative_to(PACKAGE).parts[:-1]]
    targets: list[list[str]] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            targets += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets += [[*base, alias.name] for alias in node.names]
    # A name imported from a module is no module: the longest prefix that is a module or package counts.
    parts = (["/".join(one[1:end]) for end in range(len(one), 0, -1)] for one in targets if one[0] == "cuflash")
    return {next(x for name in names for x in (name, f"{name}/__init__".strip("/")) if x in NAMES) for names in parts}


def folder_of(name: str) -> str:
    """Returns the longest entry of the layers that contains a module such as `mods/graph/affine`."""
    parts = name.split("/")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    folder = next((prefix for prefix in prefixes if prefix in LAYER_OF), None)
    assert folder is not None, f"{name} has no layer: give its folder one here and in the map of CONTRIBUTING.md"
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_lower_layers_only(name: str) -> None:
    folder = folder_of(name)
    for other in {folder_of(other) for other in imports(NAMES[name])} - {folder}:
        assert LAYER_OF[other] < LAYER_OF[folder], f"{name} imports {other}"


def test_layers_are_existing_folders_and_imports_count_at_every_depth() -> None:
    assert {folder_of(name) for name in NAMES} == set(LAYER_OF)
    assert len(NAMES) >= 165, "modules are missing"
    assert imports(PACKAGE / "testing" / "cases.py") >= {"problem/problem"}
    expected = {"arrays/find", "reference/__init__", "planning/plan", "problem/problem", "runtime/compiler"}
    assert imports(PACKAGE / "runtime" / "call.py") >= expected
    assert "mods/graph/simplify" in imports(PACKAGE / "mods" / "tracing" / "trace.py")


def test_modules_import_each_other_in_one_direction() -> None:
    graph = {name: imports(path) for name, path in NAMES.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_dir_of_the_package_shows_public_names_alone() -> None:
    code = "import sys, cuflash; print(*dir(cuflash)); print(*sys.modules)"
    names, loaded = (line.split() for line in run_python("-c", code).splitlines())
    assert names == sorted([*cuflash.__all__, "errors", "frameworks", "mods", "testing"])
    assert not {"cuflash.frameworks", "cuflash.testing"} & set(loaded)


def test_every_module_has_tests_that_pytest_collects(collected_files: set[Path]) -> None:
    modules = {name for name in NAMES if "/" in name and not name.endswith("__init__")}
    folders = {name.split("/")[0] for name in modules}
    assert set(TESTED_ELSEWHERE) <= modules | folders, "an entry of the table is of no module"
    file_of = {}
    for name in sorted(modules):
        folder, *between, module = name.split("/")
        alone, joined = (f"{folder}/test_{stem}.py" for stem in (module, "_".join((*between[:1], module))))
        files = TESTED_ELSEWHERE.get(name), alone, joined, TESTED_ELSEWHERE.get(folder)
        file_of[name] = next((file for file in files if file and (ROOT / "tests" / file).is_file()), None)
    assert not [name for name, file in file_of.items() if file is None], "these have no test file"
    # Another process collects the files that this run left out.
    left_out = sorted({file for file in file_of.values() if ROOT / "tests" / file not in collected_files})
    if not left_out:
        return
    chosen = [str(ROOT / "tests" / file) for file in left_out]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-rs", "--rootdir", str(ROOT), *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # pytest prints a file with its number of tests or, where its framework is missing, with the reason of the skip.
    printed = set(re.findall(r"^(?:SKIPPED \[\d+\] )?tests/(\S+\.py):", done.stdout, re.MULTILINE))
    assert not {file for file in left_out if file not in printed}, done.stdout + done.stderr


# Layers of kernels_cu by folder: a source includes headers of its own folder and of lower layers. Only KERNEL_FOLDERS
# have kernels.
KERNEL_LAYERS = {
    "ptx": 0,
    "common": 1,
    "sm80": 2,
    "portable": 2,
    "sm90": 2,  # its config.cuh
    "sm90/pipeline": 3,
    "sm90/forward": 4,
    "sm90/backward": 4,
    "sm90/backward_cluster": 4,
    "sm90/backward_dq_dkv": 4,
    "sm90/decode": 5,
}
KERNEL_FOLDERS = {"sm80", "portable", *(folder for folder, layer in KERNEL_LAYERS.items() if layer > 3)}


def included(path: Path) -> list[Path]:
    """Returns the files that a CUDA source includes."""
    paths = []
    for name in INCLUDE.findall(path.read_text("utf-8")):
        assert name[0] == name[-1] == '"', f"{short(path)} includes {name}: no header of the system is used"
        paths.append((path.parent / name.strip('"')).resolve())
    return paths


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_a_cuda_source_includes_lower_layers_only(path: Path) -> None:
    folder = path.parent.relative_to(KERNELS).as_posix()
    assert folder in KERNEL_LAYERS, f"{folder} has no layer: give it one here and in the map of CONTRIBUTING.md"
    assert path.suffix == ".cuh" or folder in KERNEL_FOLDERS
    for other in included(path):
        assert other.is_file()
        assert other.suffix == ".cuh"
        assert other.is_relative_to(KERNELS)
        if other.parent != path.parent:
            lower = other.parent.relative_to(KERNELS).as_posix()
            assert KERNEL_LAYERS[lower] < KERNEL_LAYERS[folder], f"{short(path)} includes {short(other)}"
            is_shared = lower not in KERNEL_FOLDERS or (folder, lower) == ("sm90/decode", "sm90/forward")
            assert is_shared, f"{short(path)} includes {short(other)}, which is of another kernel"
    if folder == "ptx":
        assert not included(path)


def test_the_layers_of_kernels_are_of_folders_that_exist() -> None:
    assert {path.parent.relative_to(KERNELS).as_posix() for path in SOURCES} == set(KERNEL_LAYERS)
    assert {path.name for path in (KERNELS / "sm90").glob("*.*")} == {"config.cuh"}


def test_a_kernel_of_hopper_does_not_repeat_its_folder_in_names_of_headers() -> None:
    headers = [path for path in (KERNELS / "sm90").glob("*/*.cuh") if path.stem.startswith(path.parent.name)]
    assert not headers


def test_headers_include_each_other_in_one_direction_and_all_are_used() -> None:
    graph = {path: included(path) for path in SOURCES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError
    used = {other for others in graph.values() for other in others}
    printed = {KERNELS / "common" / "mod_functions.cuh"}  # included by the generated text of mods
    assert {path for path in SOURCES if path.suffix == ".cuh"} == used | printed
    assert all(path.read_text("utf-8").count("#pragma once") == (path.suffix == ".cuh") for path in SOURCES)


@pytest.mark.parametrize("path", [path for path in SOURCES if path.suffix == ".cu"], ids=short)
def test_a_kernel_file_has_one_entry_named_by_the_host(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count('extern "C"') == text.count("__global__") == text.count("CUFLASH_KERNEL(") == 1
    assert text.startswith("//"), "a kernel begins with its equations and roles"


def test_macros_are_read_in_config_headers_and_defined_by_the_host() -> None:
    code = {path: re.sub(r"//.*", "", path.read_text("utf-8")) for path in SOURCES}
    read = {short(path.parent): set[str]() for path in SOURCES}
    for path, text in code.items():
        names = set(re.findall(r"\bCUFLASH_(\w+)", text))
        if path.name == "config.cuh":
            read[short(path.parent)] = names
        else:
            assert names == ({"KERNEL"} if path.suffix == ".cu" else set()), short(path)
    common = read["kernels_cu/common"]
    # Kernels without a tile have fewer macros: the common macros form two groups, and one for softcap.
    always = set(re.findall(r"\bCUFLASH_(\w+)", code[KERNELS / "common" / "config.cuh"].split("#ifdef")[0]))
    for variant in variants("sm_90"):
        family, macros = variant.source.split("/")[0], set(variant.constants) | {"PARAMS_BYTES"}
        assert always | {"KERNEL"} <= macros <= common | read[f"kernels_cu/{family}"] | {"KERNEL"}, variant.name
    for family in ("sm80", "sm90"):
        ours = [set(v.constants) for v in variants("sm_90") if v.source.startswith(family)]
        assert read[f"kernels_cu/{family}"] <= set().union(*ours), "a macro that no kernel is given"
    for name, row in DTYPES.items():
        if row.cuda is not None:
            kind = f"k{name.replace('float', 'Float').replace('bF', 'BF')}"
            assert re.search(rf"{kind} = {row.cuda}\b", code[KERNELS / "common" / "config.cuh"])


def code_lines(path: Path) -> int:
    """Counts the lines of a file that hold code: neither blank, nor a comment, nor a docstring."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return sum(bool(line.split("//")[0].strip()) for line in text.splitlines())
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        number not in docstrings and not line.strip().startswith("#") and line.strip() != "" for number, line in lines
    )


def test_files_stay_small(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(
        '"""Text\n\nmore."""\n\nx = 1  # one\n# none\n\n\ndef f():\n    """Text."""\n    return x\n', "utf-8"
    )
    assert code_lines(example) == 3
    for folder, most in (("cuflash", 400), ("kernels_cu", 400), ("tests", 400), ("examples", 150)):
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
        assert files
        many_lines = [path for path in files if len(path.read_bytes().splitlines()) > most]  # only these are parsed
        long = {short(path): lines for path in many_lines if (lines := code_lines(path)) > most}
        assert not long, f"over {most} lines of code: {long}"


def test_documents_of_kernels_name_what_is_there() -> None:
    sources = {short(path): path.read_text("utf-8") for path in (*SOURCES, *NAMES.values())}
    words, names = (
        re.compile(r"[A-Za-z_]\w*"),
        re.compile(r"((?:`[^`]+`(?:, | and ))*`[^`]+`) in `([^` ]+\.(?:cuh?|py))`"),
    )
    missing, count = [], 0
    for document in ("LESSONS.md", "DESIGN.md"):
        text = " ".join((KERNELS / document).read_text("utf-8").split())
        files = re.findall(r"`((?:sm80|sm90|common|portable|ptx|planning|runtime|problem)/[\w/]+\.(?:cuh?|py))`", text)
        missing += [name for name in files if not any(f"/{source}".endswith(f"/{name}") for source in sources)]
        for listed, name in names.findall(text):
            texts = [text for source, text in sources.items() if f"/{source}".endswith(f"/{name}")]
            listed = [word for each in listed.split("`")[1::2] if "/" not in each for word in words.findall(each)]
            missing += [f"{word} in {name}" for word in listed if not any(word in text for text in texts)]
            count += len(listed)
    assert not missing
    assert count >= 10


def test_no_lock_is_left_to_children_by_fork() -> None:
    kinds = re.compile(r"threading\.(R?Lock|Condition|Event|Semaphore)|@(functools\.)?cached_property")
    modules = {name for name, path in NAMES.items() if kinds.search(path.read_text("utf-8"))}
    assert modules == {"locks", "frameworks/jax/handlers"}, "take the locks of cuflash/locks.py"


def test_the_top_level_holds_what_it_may() -> None:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {name.split("/")[0] for name in git.stdout.split("\0") if name}
    if git.returncode != 0 or "cuflash" not in tracked:
        pytest.skip("needs a git checkout")
    assert {name for name in tracked if not name.startswith(".")} <= TOP_LEVEL
    assert {"pyproject.toml", "README.md", "cuflash", "kernels_cu", "tests", "examples"} <= tracked


def test_importing_cuflash_imports_no_array_library_but_numpy() -> None:
    code = "import sys, cuflash; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = set(run_python("-c", code).split())
    assert {"cuflash", "numpy"} <= loaded
    assert not loaded & {"cupy", "cupy_backends", "torch", "jax", "jaxlib", "ml_dtypes", "rich"}


def test_the_public_names_are_there_and_documented() -> None:
    for name in cuflash.__all__:
        assert getattr(cuflash, name).__doc__
    assert list(cuflash.__all__) == sorted(cuflash.__all__)


@pytest.mark.skipif(not CONTRIBUTING.is_file(), reason="the sdist has no .github")
def test_the_map_of_contributing_has_all_layers() -> None:
    text = CONTRIBUTING.read_text("utf-8").split("## Map of the tree")[1].split("\n## ")[0]
    maps: list[dict[int, set[str]]] = []
    for table in text.split("\n| layer |")[1:]:
        maps.append({})
        for layer, cell in re.findall(r"^\| (\d+) \| ([^|]*) \|", table, re.MULTILINE):
            names = {name.removesuffix(".py").strip("/") for name in re.findall(r"`([^`]+)`", cell)}
            maps[-1].setdefault(int(layer), set()).update(names)
    of_package, of_kernels = maps
    expected = {layer: {name.replace(".", "/") for name in names} for layer, names in LAYERS.items()}
    expected[0] -= {"arrays/__init__"}
    assert of_package == expected
    assert {name: layer for layer, names in of_kernels.items() for name in names} == KERNEL_LAYERS
