"""Which models of transformers may be loaded with cuflash, and that transformers does not take it for flash-attn."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from transformers.modeling_utils import PreTrainedModel
from transformers.utils import generic

from ...errors import UnsupportedError

NAME = "cuflash"
EAGER = 'load the model with attn_implementation="eager"'
SDPA = 'load the model with attn_implementation="sdpa"'
# Some models test for the flash-attn package in this way, and the name "cuflash" would pass the test.
_TAKES_FOR_FLASH_ATTN = re.compile(r"""["']flash["'] in [\w.]*_attn_implementation""")


@functools.cache
def tell_from_flash_attn() -> None:
    """Stops transformers 5 from taking "cuflash" for the flash-attn package.

    why: it takes any name with "flash" in it for that package, fails to load it, and would give layers cu_seq_lens in
    place of masks. One function decides this. Modules import it by name, so it is replaced in every loaded module.
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


def refuse_by_name() -> None:
    """Makes transformers refuse "cuflash" for models that have attention code of their own.

    why: transformers does not ask a model whether it supports a registered name. Such a model would not call our
    function, would use our mask in its own code (where None shows what follows), or would find no class of the name.
    """
    # The method's name in transformers 4.53, and its name in later versions.
    for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
        original: Any = getattr(PreTrainedModel, name, None)
        if original is None or hasattr(original, "of_cuflash"):
            continue

        @functools.wraps(original)
        def validated(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            # why any argument: models pass the name by position or by keyword, and the keyword differs between them.
            if NAME in (*args, *kwargs.values()):
                _validate(type(self))
                _refuse_in_tables(type(self))
            return original(self, *args, **kwargs)

        validated.of_cuflash = True  # type: ignore[attr-defined]
        setattr(PreTrainedModel, name, validated)


@functools.cache
def refuse_by_configuration(config: type) -> None:
    """Raises UnsupportedError if models of this class of configurations have attention code of their own.

    why: a name that is set as an attribute of the configuration of a finished model is judged by nobody. Such a model
    then takes our mask, and computes without one.
    """
    module = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    for model in () if module is None else vars(module).values():
        is_model = isinstance(model, type) and issubclass(model, PreTrainedModel)
        if is_model and getattr(model, "config_class", None) is config:
            # why not those of images: they ask for no masks.
            if any("VISION" not in name for name in _tables_of(model)):
                raise _unsupported_attention(model)
            _validate(model)
            return


def _tables_of(model: type) -> dict[str, Any]:
    """The tables of classes, in a model's file, from which its modules take their attention by the name of it."""
    code = vars(sys.modules[model.__module__])
    return {name: table for name, table in code.items() if name.endswith("ATTENTION_CLASSES")}


def _refuse_in_tables(model: type) -> None:
    """Makes modules that take their attention from a table refuse our name, as those of SAM that see the image do.

    why not the model: its other modules call functions, or belong to models of the same file that have none of these.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise _unsupported_attention(model)

    for table in _tables_of(model).values():
        table.setdefault(NAME, refused)


def _unsupported_attention(model: type) -> UnsupportedError:
    return UnsupportedError(f"{model.__name__} has attention of its own, which cuflash is not; {EAGER}")


def _validate(model: type) -> None:
    """Raises UnsupportedError for a model that would not call our function, or would lose its masks."""
    module = sys.modules[model.__module__]
    supports_backend = getattr(model, "_supports_attention_backend", False)
    has_tables_alone = bool(_tables_of(model)) and not hasattr(module, "ALL_ATTENTION_FUNCTIONS")
    if has_tables_alone or not (supports_backend or getattr(model, "_supports_sdpa", False)):
        raise _unsupported_attention(model)
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # the model was typed in and has no file
        return
    if _TAKES_FOR_FLASH_ATTN.search(source):
        raise UnsupportedError(
            f'{model.__name__} takes every name with "flash" in it for the flash-attn package, and would drop its '
            f"padding mask; {SDPA}, or take another version of transformers"
        )
