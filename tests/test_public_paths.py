"""Public import paths: names that the README, the guide and examples show, and modules for frameworks."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import cuflash

PACKAGE = Path(cuflash.__file__).parent
MASKS = (
    *("and_masks", "block_diffusion", "causal", "chunked", "dilated_window", "document", "global_window"),
    *("neighborhood", "or_masks", "prefix_lm", "segments", "sliding_window", "tree"),
)
FUNCTIONS = (
    *("where", "minimum", "maximum", "clip", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid"),
    *("sin", "cos", "erf", "floor", "ceil", "trunc", "round", "sign"),
)
OF_FLASH_ATTN_2 = (
    *("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"),
    *("flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"),
)
OF_FLASH_ATTN_3 = (
    *("flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func"),
    *("flash_attn_with_kvcache", "get_scheduler_metadata"),
)
OF_RING_FLASH_ATTN = (
    *(f"{order}_flash_attn_{form}func" for order in ("ring", "zigzag_ring", "stripe")
      for form in ("", "kvpacked_", "qkvpacked_")),
    *(f"{order}_flash_attn_varlen_{form}func" for order in ("ring", "zigzag_ring", "llama3")
      for form in ("", "kvpacked_", "qkvpacked_")),
    *("llama3_flash_attn_prepare_cu_seqlens", "substitute_hf_flash_attn", "update_ring_flash_attn_params"),
)  # fmt: skip
# Paths, each with the packages that it imports beside NumPy.
PATHS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cuflash": ((), (
        *("BlockMask", "CompileError", "ProblemError", "UnsupportedError", "append_kv", "backward"),
        *("create_block_mask", "forward", "lse", "merge_states", "mods", "plan", "triangle_attention"),
    )),
    "cuflash.mods": ((), (
        *MASKS, *FUNCTIONS, "alibi", "position_of", "relative_position", "seqlen_k", "seqlen_q", "softcap",
    )),
    "cuflash.reference": ((), ("flash1", "flash2", "flashd")),
    **{f"cuflash.reference.flash{name}": ((), ("finish", "start", "update")) for name in "12d"},
    "cuflash.reference.tiles": ((), ("Tile",)),
    "cuflash.frameworks": ((), ()),
    "cuflash.frameworks.flash_attn": (("torch",), ("activate", "restore")),
    "cuflash.frameworks.flash_attn_interface": (("torch",), OF_FLASH_ATTN_2),
    "cuflash.frameworks.flash_attn_3_interface": (("torch",), OF_FLASH_ATTN_3),
    "cuflash.frameworks.flash_attn_4_interface": (("torch",), ("flash_attn_func", "flash_attn_varlen_func")),
    "cuflash.frameworks.jax": (
        ("jax",),
        ("attention", "dot_product_attention", "ragged_paged_attention", "triangle_attention"),
    ),
    "cuflash.frameworks.ring_flash_attn": (("torch",), OF_RING_FLASH_ATTN),
    "cuflash.frameworks.sdpa": (("torch",), ("activate", "restore")),
    "cuflash.frameworks.torch": (("torch",), ("attention", "flex_attention", "triangle_attention")),
    "cuflash.frameworks.transformers": (
        ("torch", "transformers"),
        ("cuflash_attention_forward", "cuflash_mask", "register"),
    ),
}  # fmt: skip
# Modules hidden by a function of their package. This set may only shrink.
HIDDEN = {"cuflash.reference.backward"}


@pytest.mark.parametrize("module", PATHS)
def test_a_public_path_resolves(module: str) -> None:
    packages, names = PATHS[module]
    assert find_spec(module) is not None
    if all(map(find_spec, packages)):
        imported = importlib.import_module(module)
        assert not [name for name in names if not hasattr(imported, name)]


def exported(package: Path) -> set[str]:
    """Returns the names that a package defines or takes from its modules, without the modules themselves."""
    names: set[str] = set()
    for node in ast.parse((package / "__init__.py").read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_no_module_has_the_name_of_a_function_of_its_package() -> None:
    hidden, packages = set[str](), [path.parent for path in PACKAGE.rglob("__init__.py")]
    assert len(packages) >= 10
    for package in packages:
        modules = {path.stem for path in package.glob("*.py")} | {path.parent.name for path in package.glob("*/*.py")}
        name = ".".join((PACKAGE.name, *package.relative_to(PACKAGE).parts))
        hidden |= {f"{name}.{each}" for each in modules & exported(package)}
    assert hidden == HIDDEN
