"""Checks of models of transformers: refuses unsupported ones, and keeps "cuflash" apart from flash-attn."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import generic

from ...errors import UnsupportedError
from ...log import logger
from ..torch import attention
from .masks import is_recorded

try:
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:  # before version 5, which warns itself
    _collector = None

NAME = "cuflash"
EAGER = 'load the model with attn_implementation="eager"'
SDPA = 'load the model with attn_implementation="sdpa"'
# A test of some models for the flash-attn package, which the name "cuflash" would pass.
_TAKES_FOR_FLASH_ATTN = re.compile(r"""["']flash["'] in [\w.]*_attn_implementation""")


@functools.cache
def tell_from_flash_attn() -> None:
    """Stops transformers 5 from taking "cuflash" for the flash-attn package.

    It takes any name with "flash" in it for that package, fails to load it, and would pass layers cu_seq_lens in place
    of masks. One function decides this. Modules import it by name, so it is replaced in every loaded module.
    """
    original: Any = getattr(generic, "is_flash_attention_requested", None)
    if original is None:
        return

    @functools.wraps(original)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        name = requested_attention_implementation if config is None else config._attn_implementation
        return name != NAME and original(config, requested_attention_implementation, *args, **kwargs)

    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is original:
            module.is_flash_attention_requested = is_flash_attention_requested  # type: ignore[attr-defined]


def refuse_weights(is_requested: Any) -> None:
    """Raises if attention weights are requested: of the layer, or of a model, which then collects them from its layers.

    Many layers get no flag, and a model that collects no weights would return an empty tuple.
    """
    if is_requested or _collects_weights():
        raise UnsupportedError(f"output_attentions=True: cuflash never holds the attention weights; {EAGER}")


def _collects_weights() -> bool:
    if _collector is None:
        return False
    if torch.compiler.is_compiling():
        # transformers sets this in graphs, as the compiler cannot read a context variable.
        return _names_weights(_collector.global_var) or _are_collected_around()
    return _names_weights(_collector.get())


@torch.compiler.assume_constant_result
def _are_collected_around() -> bool:
    """True if the uncompiled model around the layers collects weights, while a graph of them is built."""
    return _names_weights(_collector.context_var.get())


def _names_weights(collected: Any) -> bool:
    return bool(collected) and any([name.endswith("attentions") for name in collected])


@functools.cache
def _log_sdpa(layer: str) -> None:
    logger.debug("%s is compiled with a mask tensor: transformers' sdpa computes it, and not cuflash", layer)


@torch.compiler.assume_constant_result
def tell_of_sdpa(layer: str) -> bool:
    """Logs that sdpa computes a layer, while a graph is built, outside of the graph."""
    _log_sdpa(layer)
    return True


def refuse_by_name() -> None:
    """Makes transformers refuse "cuflash" for models that have attention code of their own.

    transformers accepts a registered name for any model. Such a model would not call our function. It would use our
    mask in its own code, where None shows later tokens, or would lack a class of the name.
    """
    # The method's name in transformers 4.53, and its name in later versions.
    for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        original: Any = getattr(PreTrainedModel, name, None)
        if original is None or hasattr(original, "of_cuflash"):
            continue

        @functools.wraps(original)
        def validated(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            # Any argument: models pass the name by position or by keyword, under different keywords.
            if NAME in (*args, *kwargs.values()):
                _validate(type(self))
                _enter_into_tables(type(self))
            return original(self, *args, **kwargs)

        validated.of_cuflash = True  # type: ignore[attr-defined]
        setattr(PreTrainedModel, name, validated)


@functools.cache
def refuse_by_configuration(config: type) -> None:
    """Raises UnsupportedError if models of this configuration class have attention code of their own.

    transformers does not validate a name that is set on the configuration of a loaded model. Such a model would use our
    mask in its own attention, and compute without one where it is None.
    """
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    for model in () if module is None else vars(module).values():
        is_model = isinstance(model, type) and issubclass(model, PreTrainedModel)
        if is_model and getattr(model, "config_class", None) is config:
            # Image tables are exempt: their modules use no masks.
            if any("VISION" not in name for name in _tables_of(model)):
                raise _unsupported_attention(model)
            _validate(model)
            return


def _tables_of(model: type) -> dict[str, Any]:
    """Returns the tables of classes in a model's file, from which its modules take attention by name."""
    code = vars(sys.modules[model.__module__])
    return {name: table for name, table in code.items() if name.endswith("ATTENTION_CLASSES")}


def _is_offered(name: str, table: dict[str, Any]) -> bool:
    """True for a table of image attention with a class for sdpa: its modules use no masks, and check no name."""
    return "VISION" in name and "sdpa" in table


def _enter_into_tables(model: type) -> None:
    """Adds our name to the tables of a model's file (SAM, Data2VecVision), or a class that refuses.

    The model itself is not refused: its other modules call functions, or belong to models of the file without a table.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise _unsupported_attention(model)

    for name, table in _tables_of(model).items():
        table.setdefault(NAME, _on_cuflash(table["sdpa"]) if _is_offered(name, table) else refused)


class _SdpaOnCuflash(TorchFunctionMode):
    """A mode in which cuflash computes PyTorch's scaled_dot_product_attention."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_sdpa = function is torch.nn.functional.scaled_dot_product_attention
        return (_sdpa if is_sdpa else function)(*args, **(kwargs or {}))


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes PyTorch's function, with its arguments; operands are (batch, heads, seqlen, head_dim), or without batch.

    Layers with masks in graphs stay on PyTorch's function: each graph would end at them otherwise.
    """
    if attn_mask is not None and is_recorded():
        tell_of_sdpa("A layer of a model of images")
        result: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    out: torch.Tensor = attention(
        *(x.transpose(-3, -2) for x in (query, key, value)),
        softmax_scale=scale,
        causal=is_causal,
        diagonal_offset=0 if is_causal else None,
        bias=attn_mask,
        dropout_p=dropout_p,
    )
    return out.transpose(-3, -2).contiguous()


@functools.cache
def _on_cuflash(sdpa_class: Any) -> Any:
    """Returns a subclass of a model's sdpa attention class that runs on cuflash."""
    signature = inspect.signature(sdpa_class.forward)

    class OnCuflash(sdpa_class):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            refuse_weights(signature.bind(self, *args, **kwargs).arguments.get("output_attentions"))
            with _SdpaOnCuflash():
                return super().forward(*args, **kwargs)

        # pickle, and spawned processes, cannot find a class that is created here by name.
        def __reduce__(self) -> tuple[Any, ...]:
            return _empty_on_cuflash, (sdpa_class,), self.__dict__

    return OnCuflash


def _empty_on_cuflash(sdpa_class: Any) -> Any:
    attention_class = _on_cuflash(sdpa_class)
    return attention_class.__new__(attention_class)


def _unsupported_attention(model: type) -> UnsupportedError:
    """Returns the error for a model that would not call our function; it names an implementation for it."""
    module = model.__module__
    names = (name.lower() for name, x in vars(sys.modules[module]).items() if getattr(x, "__module__", None) == module)
    if not any("attention" in name or "attn" in name for name in names):
        return UnsupportedError(
            f"{model.__name__} has no attention, and so nothing that cuflash computes; load it without "
            "attn_implementation"
        )
    has_sdpa = getattr(model, "_supports_sdpa", False)
    activated = "cuflash.frameworks.sdpa.activate() puts calls on cuflash that PyTorch's fused kernels could take"
    way = f"{SDPA}; {activated}" if has_sdpa else EAGER
    return UnsupportedError(f"{model.__name__} has attention of its own, which cuflash is not; {way}")


def _validate(model: type) -> None:
    """Raises UnsupportedError for a model that would not call our function, or would lose its masks."""
    module = sys.modules[model.__module__]
    supports_backend = getattr(model, "_supports_attention_backend", False)
    is_refused = not all(_is_offered(*each) for each in _tables_of(model).items())
    has_tables_alone = is_refused and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    if has_tables_alone or not (supports_backend or getattr(model, "_supports_sdpa", False)):
        raise _unsupported_attention(model)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # the model was defined interactively, without a file
        return
    if _TAKES_FOR_FLASH_ATTN.search(source):
        raise UnsupportedError(
            f'{model.__name__} takes every name with "flash" in it for the flash-attn package, and would drop its '
            f"padding mask; {SDPA}, or take another version of transformers"
        )
