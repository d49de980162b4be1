"""cuflash under flash-attn's names: registered modules, clients that import them, and `restore`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from refusals import refused
from workers import run_python

from cuflash import UnsupportedError
from cuflash.frameworks import flash_attn
from cuflash.frameworks.flash_attn import bert_padding, v2, v2_gpu, v3, v4

ROOTS = "flash_attn", "flash_attn_3", "flash_attn_interface"
if any(importlib.util.find_spec(name) for name in ROOTS):
    pytest.skip("flash-attn itself is installed", allow_module_level=True)
MODULES = {
    "flash_attn": v2,
    "flash_attn.flash_attn_interface": v2,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.cute": v4,
    "flash_attn.cute.interface": v4,
    "flash_attn_3.flash_attn_interface": v3,
    "flash_attn_interface": v3,
}


def registered() -> dict[str, Any]:
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] in ROOTS}


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = registered()
    yield
    flash_attn.restore()
    assert registered() == before
    assert not [finder for finder in sys.meta_path if type(finder).__module__ == flash_attn.__name__]
    importlib.invalidate_caches()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs a package flash_attn with a module that cuflash does not have."""
    for name, text in (
        ("flash_attn/__init__.py", "__version__ = '1.0'"),
        ("flash_attn/layers/__init__.py", ""),
        ("flash_attn/layers/rotary.py", "from flash_attn import __version__ as version"),
        ("flash_attn/cute/__init__.py", ""),
        ("flash_attn/cute/utils.py", "here = True"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    flash_attn.restore()
    for name in registered():
        del sys.modules[name]


def test_imports_find_the_functions_of_cuflash_under_their_names() -> None:
    flash_attn.activate()
    for name, source in MODULES.items():
        module = importlib.import_module(name)
        assert module.__spec__ is importlib.util.find_spec(name)
        assert (module.__name__, module.__spec__.name) == (name, name)
        for one in source.__all__:
            assert getattr(module, one) is getattr(source, one)
        parent, _, child = name.rpartition(".")
        assert not parent or getattr(sys.modules[parent], child) is module
    from flash_attn import flash_attn_varlen_func
    from flash_attn.bert_padding import pad_input, unpad_input
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward, _wrapped_flash_attn_forward
    from flash_attn_interface import _flash_attn_backward

    assert "window_size" in inspect.signature(flash_attn_varlen_func).parameters
    assert _wrapped_flash_attn_forward is v2._flash_attn_forward
    assert _flash_attn_varlen_backward is v2._flash_attn_varlen_backward
    assert _flash_attn_backward is v3._flash_attn_backward
    x, mask = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([[1, 1, 0], [1, 0, 0]])
    rows, indices, *_ = unpad_input(x, mask)
    assert torch.equal(pad_input(rows, indices, 2, 3), x * mask[..., None])


def test_versions_are_accepted_by_clients() -> None:
    flash_attn.activate()
    import flash_attn as theirs

    assert theirs.__version__ == "2.8.3"


def test_absent_modules_are_not_found() -> None:
    flash_attn.activate()
    for name in ("layers", "layers.rotary", "ops.triton.rotary", "losses", "modules.mha", "cute.utils"):
        first = name.split(".")[0] if "cute" not in name else name
        words = f"No module named 'flash_attn.{first}': cuflash stands in for flash-attn here"
        with pytest.raises(ModuleNotFoundError, match=words) as caught:
            importlib.import_module(f"flash_attn.{name}")
        assert caught.value.name == f"flash_attn.{first}"
        assert importlib.util.find_spec(f"flash_attn.{first}") is None  # programs look for modules by it
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn_2_cuda")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'flash_attention'$"):
        importlib.import_module("flash_attention")
    assert importlib.util.find_spec("flash_attn_3._C") is None


def test_absent_names_are_import_errors_that_name_cuflash() -> None:
    flash_attn.activate()
    for name, missing in (("flash_attn", "layers"), ("flash_attn", "zzz"), ("flash_attn.bert_padding", "zzz"),
                          ("flash_attn.flash_attn_interface", "attend"), ("flash_attn.cute", "utils"),
                          ("flash_attn_interface", "flash_attn_cuda")):  # fmt: skip
        with refused(ImportError, f"cannot import name '{missing}' from '{name}': cuflash stands in for flash-attn",
                     "it has flash_attn, flash_attn.flash_attn_interface", "install flash-attn"):  # fmt: skip
            exec(f"from {name} import {missing}", {})
    for name in MODULES:
        module = importlib.import_module(name)
        assert not hasattr(module, "flash_attn_cuda")
        with pytest.raises(AttributeError, match=f"'{name}' has no attribute 'attend': cuflash stands in"):
            _ = module.attend


def test_the_compiled_module_of_version_2_is_an_attribute() -> None:
    flash_attn.activate()
    from flash_attn.flash_attn_interface import flash_attn_gpu

    assert flash_attn_gpu is v2_gpu
    assert not hasattr(importlib.import_module("flash_attn"), "flash_attn_gpu")


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.cute", "flash_attn_interface"])
def test_modules_are_pickled_by_their_names(name: str) -> None:
    flash_attn.activate()
    module = importlib.import_module(name)
    assert pickle.loads(pickle.dumps(module)) is module


@pytest.mark.parametrize("module", ["xformers.ops", "diffusers.models.attention_dispatch"])
@pytest.mark.parametrize("as_installed", [False, True])
def test_other_libraries_import_afterwards(module: str, as_installed: bool) -> None:
    pytest.importorskip(module.split(".")[0])
    activate = f"from cuflash.frameworks import flash_attn; flash_attn.activate(as_installed={as_installed})"
    assert run_python("-c", f"{activate}; import {module}; print('imported')").splitlines()[-1] == "imported"


def test_flex_attention_on_version_4_kernels_is_refused_before_compiling() -> None:
    flex = pytest.importorskip("torch._inductor.kernel.flex.flex_flash_attention")
    flash_attn.activate()
    try:
        flex.ensure_flash_available.cache_clear()
        with pytest.raises(UnsupportedError, match=r'BACKEND="FLASH".*cuflash stands in.*torch.flex_attention.*TRITON'):
            flex.ensure_flash_available()
        flash_attn.restore()
        assert not flex.ensure_flash_available()
    finally:
        flex.ensure_flash_available.cache_clear()
    flash_attn.activate()
    assert importlib.util.find_spec("flash_attn.cute") is not None
    with pytest.raises(ImportError, match=r"_flash_attn_fwd.*cuflash"):
        from flash_attn.cute.interface import _flash_attn_fwd  # noqa: F401


@pytest.mark.gpu
def test_flex_attention_on_version_4_kernels_raises_our_error() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    flash_attn.activate()
    q, k, v = torch.randn(3, 1, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda *x: flex_attention(*x, kernel_options={"BACKEND": "FLASH"}))
    with pytest.raises(Exception, match="cuflash stands in for it"):  # PyTorch wraps errors of its compiler
        compiled(q, k, v)


def test_second_activate_and_second_restore_do_nothing() -> None:
    flash_attn.restore()
    flash_attn.activate()
    first = registered()
    flash_attn.activate(force=True, as_installed=True)
    assert registered() == first
    flash_attn.restore()
    flash_attn.restore()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_an_installed_package_is_refused_unless_forced(package: Path) -> None:
    words = f"flash_attn .{package}.* is installed; give force=True.*as_installed=True"
    with pytest.raises(UnsupportedError, match=words):
        flash_attn.activate()
    assert not registered()
    flash_attn.activate(force=True)
    assert importlib.import_module("flash_attn").flash_attn_func is v2.flash_attn_func
    assert importlib.import_module("flash_attn.layers.rotary").version == "2.8.3"
    assert importlib.import_module("flash_attn.cute.utils").here
    flash_attn.restore()
    assert not registered()
    assert importlib.import_module("flash_attn.layers.rotary").version == "1.0"


def test_restore_brings_back_an_installed_package(package: Path) -> None:
    before = {name: importlib.import_module(name) for name in ("flash_attn", "flash_attn.layers", "flash_attn.cute")}
    flash_attn.activate(force=True)
    theirs = importlib.import_module("flash_attn")
    assert theirs is not before["flash_attn"]
    assert theirs.layers is before["flash_attn.layers"]
    flash_attn.restore()
    assert registered() == before
    assert before["flash_attn"].cute is before["flash_attn.cute"]


def test_registered_stub_is_refused_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = type(sys)("flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stub)
    with pytest.raises(UnsupportedError, match=r"flash_attn_interface .* is installed"):
        flash_attn.activate()
    flash_attn.activate(force=True)
    assert sys.modules["flash_attn_interface"] is not stub
    flash_attn.restore()
    assert sys.modules["flash_attn_interface"] is stub


def test_distributions_are_listed_only_as_installed() -> None:
    flash_attn.activate()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    flash_attn.restore()
    flash_attn.activate(as_installed=True)
    assert [importlib.metadata.version(name) for name in ("flash_attn", "flash-attn", "Flash.Attn")] == ["2.8.3"] * 3
    assert importlib.metadata.version("flash_attn_3") == "3.0.0"
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn", "flash-attn-4"]
    assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
    assert importlib.metadata.version("numpy")
    flash_attn.restore()
    flash_attn.activate()
    flash_attn.activate(as_installed=True)  # a later call may add it
    assert importlib.metadata.version("flash_attn") == "2.8.3"
    flash_attn.restore()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


TRANSFORMERS = """
from cuflash.frameworks import flash_attn
flash_attn.activate(as_installed={as_installed})
import torch
from transformers.utils import import_utils
import_utils.is_torch_cuda_available = lambda: True
print([getattr(import_utils, f"is_flash_attn_{{i}}_available")() for i in (2, 3, 4)])
if {as_installed}:
    from cuflash.frameworks.torch import attention
    from transformers import modeling_flash_attention_utils as utils
    q, k, v = (torch.randn(1, 9, heads, 16) for heads in (4, 2, 2))
    for version in (2, 3, 4):
        name = f"flash_attention_{{version}}"
        (function, *_), _ = utils.lazy_import_flash_attention(name)
        result = utils._flash_attention_forward(
            q, k, v, None, query_length=9, is_causal=True, sliding_window=4, softcap=2.0, implementation=name
        )
        expected = attention(q, k, v, causal=True, window_size=(3, 3), softcap=2.0)
        print(function.__module__, torch.equal(result, expected))
"""


@pytest.mark.parametrize("as_installed", [False, True])
def test_transformers_offers_flash_attention_as_installed(as_installed: bool) -> None:
    pytest.importorskip("transformers", "5.0", reason="its checks are written as in version 5")
    printed = run_python("-c", TRANSFORMERS.format(as_installed=as_installed)).splitlines()
    assert printed[0] == str([as_installed] * 3)
    versions = (2, 3, 4) if as_installed else ()
    assert printed[1:] == [f"cuflash.frameworks.flash_attn.v{version} True" for version in versions]
