"""Models of transformers that are refused, with advice, and models that take attention from a table of classes."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="4.53")

from models import IDS, counted_calls

from cuflash.errors import UnsupportedError
from cuflash.frameworks.transformers import models as tables

__all__ = ["counted_calls"]  # the fixture, which registers cuflash

SDPA_INSTEAD = r'="sdpa"; cuflash\.frameworks\.sdpa\.activate\(\) puts calls on cuflash that PyTorch\'s fused'
INSTEAD = {"Bloom": '="eager"$', "Falcon": SDPA_INSTEAD, "RemBert": '="eager"$', "XGLM": '="eager"$'}


@pytest.mark.parametrize("family", INSTEAD)
def test_models_with_other_attention_are_refused(family: str) -> None:
    config = getattr(transformers, f"{family}Config")()
    config.hidden_size = config.n_head = config.num_hidden_layers = 2
    model = getattr(transformers, f"{family}Model")
    text = rf"{family}Model has attention of its own.*{INSTEAD[family]}"
    with torch.device("meta"), pytest.raises(UnsupportedError, match=text):
        model._from_config(config, attn_implementation="cuflash")


@pytest.mark.parametrize("family", ["Bloom", "Falcon"])
def test_models_with_other_attention_are_refused_by_attribute(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "n_layer": 1, "num_attention_heads": 2}
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**sizes, n_head=2)).eval()
    model(IDS)
    model.config._attn_implementation = "cuflash"
    with pytest.raises(UnsupportedError, match=rf"{family}\w+ has attention of its own.*{INSTEAD[family]}"):
        model(IDS)


@pytest.mark.parametrize("family", ["Mamba", "ResNet", "FNet"])
def test_models_without_attention_are_refused_as_such(family: str) -> None:
    model, config = (getattr(transformers, f"{family}{kind}") for kind in ("Model", "Config"))
    text = (
        rf"^{family}Model has no attention, and so nothing that cuflash computes; load it without attn_implementation"
    )
    with torch.device("meta"), pytest.raises(UnsupportedError, match=text):
        model._from_config(config(), attn_implementation="cuflash")


def test_modules_without_a_class_for_the_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[transformers.SamModel.__module__]
    table = {"eager": module.SAM_VISION_ATTENTION_CLASSES["eager"]}
    monkeypatch.setattr(module, "SAM_VISION_ATTENTION_CLASSES", table)
    config = transformers.SamVisionConfig(**SMALL_VISION)
    with (
        torch.device("meta"),
        pytest.raises(UnsupportedError, match=r"Sam\w+ has attention of its own.*" + SDPA_INSTEAD),
    ):
        transformers.SamVisionModel._from_config(config, attn_implementation="cuflash")


SMALL_VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 4,
                "initializer_range": 0.3}  # fmt: skip
SAM = {"output_channels": 8, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 32}
VISION = {
    "SamVision": SAM,
    "SamHQVision": SAM,
    "Data2VecVision": {"intermediate_size": 32, "use_relative_position_bias": True, "layer_scale_init_value": 1.0},
}


@pytest.mark.parametrize("mode", ["eval", "train", "compiled"])
@pytest.mark.parametrize("family", VISION)
def test_image_models_with_tables_of_classes_equal_eager(
    family: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With position biases, which have gradients, and SAM's windows."""
    kind, settings = getattr(transformers, f"{family}Model"), SMALL_VISION | VISION[family]
    images, layers = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), []
    run = tables.attention
    monkeypatch.setattr(tables, "attention", lambda *args, **kwargs: (layers.append(0), run(*args, **kwargs))[1])
    results = []
    for name in ("eager", "cuflash"):
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**settings, hidden_dropout_prob=0.0)
        model = kind._from_config(config, attn_implementation=name).train(mode == "train")
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "rel" in parameter_name:  # initialised to zeros
                    parameter.normal_(0.0, 0.5)
        call = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
        out = call(images).last_hidden_state
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * weights).sum().backward()
        results.append([out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert layers or mode == "compiled"
    assert len(results[0]) == len(results[1])
    assert any("rel" in parameter_name for parameter_name, _ in model.named_parameters())
    for got, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 + 1e-4 * float(expected.abs().max()))
    if mode == "eval":
        with pytest.raises(UnsupportedError, match="output_attentions=True: cuflash never holds"):
            next(x for x in model.modules() if type(x).__name__ == "OnCuflash")(None, output_attentions=True)


@pytest.mark.parametrize("has_mask", [True, False], ids=["mask", ""])
@pytest.mark.parametrize("family", VISION)
def test_image_models_compile_to_one_graph(family: str, has_mask: bool, caplog: pytest.LogCaptureFixture) -> None:
    """In a graph, layers without a position bias run on cuflash, and others on PyTorch's function."""
    torch._dynamo.reset()
    tables._log_sdpa.cache_clear()
    settings = SMALL_VISION | VISION[family] | {"use_rel_pos": has_mask, "use_relative_position_bias": has_mask}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="cuflash").eval()
    images = torch.randn(1, 3, 32, 32)
    with caplog.at_level("DEBUG", "cuflash"):
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(images).last_hidden_state
    torch.testing.assert_close(out, model(images).last_hidden_state, rtol=1e-4, atol=1e-4)
    messages = [record.getMessage() for record in caplog.records if "not cuflash" in record.getMessage()]
    assert len(messages) == has_mask


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", VISION)
def test_attention_weights_are_refused_where_layers_get_no_flag(family: str, is_compiled: bool) -> None:
    torch._dynamo.reset()
    config = getattr(transformers, f"{family}Config")(**SMALL_VISION, **VISION[family])
    model = getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="cuflash").eval()
    images = torch.randn(1, 3, 32, 32)
    call = torch.compile(model, backend="eager") if is_compiled else model
    with pytest.raises(UnsupportedError, match=r'output_attentions=True: cuflash never holds.*"eager"$'):
        call(images, output_attentions=True)
    assert call(images).last_hidden_state.shape[0] == 1


def test_image_models_with_tables_are_copied_and_pickled() -> None:
    config = transformers.SamVisionConfig(**SMALL_VISION, **SAM)
    model = transformers.SamVisionModel._from_config(config, attn_implementation="cuflash").eval()
    images = torch.randn(1, 3, 32, 32)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(clone(images).last_hidden_state, model(images).last_hidden_state)
