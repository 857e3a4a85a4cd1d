"""What each attention layer of a transformers model attends, besides the mask of the batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ringtile.errors import RefusedError
from ringtile.hf.families import MIXERS


class LayerMask(NamedTuple):
    """Narrows the mask of a batch for one layer; neither: full attention."""

    window: int | None = None  # tokens up to the query's own, which is included
    causal: bool = True  # else the window holds as many tokens after the query's own
    chunk: int | None = None  # tokens; chunks are counted over the row, from its first token that is not padding


_TYPES_OF_ENCODERS = frozenset({"full_attention", "sliding_attention"})
_TYPES_OF_DECODERS = _TYPES_OF_ENCODERS | {"chunked_attention"}


def known_types(causal: bool) -> frozenset[str]:
    """The values of config.layer_types whose masks are intervals."""
    return _TYPES_OF_DECODERS if causal else _TYPES_OF_ENCODERS


# Of layers that hold a recurrent mixer; a hybrid one attends too.
RECURRENT_TYPES = frozenset({"linear_attention", "conv", "hybrid"})


def mixers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return the mixers among modules, by path."""
    return _of_classes(modules, MIXERS)


def refuse_indexers(model: str, modules: Iterable[tuple[str, nn.Module]], instead: Callable[[], str]) -> None:
    """Raise RefusedError for learned sparse attention (DSA, arXiv:2512.02556), for which there is no kernel."""
    for path, module in modules:
        if "Indexer" in type(module).__name__:
            raise RefusedError(
                f"{model} chooses the keys of each query (learned sparse attention), for which ringtile has no kernel; "
                f"expected queries that attend all keys of a mask, and no {path} ({type(module).__name__}): {instead()}"
            )


def _of_classes(modules: Iterable[tuple[str, nn.Module]], names: Container[str]) -> dict[str, nn.Module]:
    """Also those that FSDP2 shards, which it gives a class of its own."""
    return {path: module for path, module in modules if any(cls.__name__ in names for cls in type(module).__mro__)}


def layer_masks(config: Any, causal: bool = True) -> list[LayerMask]:
    """Of each layer. config: of the text model; causal: whether it attends no later token."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    own = getattr(config, "per_layer_config", None)  # NeoMME: each layer has a window of its own
    return [_mask_of(own[i] if own else config, kind, causal) for i, kind in enumerate(kinds)]


def mask_of_layer(module: nn.Module, options: Mapping[str, Any]) -> LayerMask:
    """Of an attention module, which was called with these options."""
    config, index, causal = module.config, getattr(module, "layer_idx", None), is_causal(module)
    kinds = getattr(config, "layer_types", None)
    if kinds and isinstance(index, int) and kinds[index] == "chunked_attention":
        return _mask_of(config, kinds[index], causal)
    if "sliding_window" in options:
        window = options["sliding_window"]
        # By its config alone, or Gemma 4: it hands on its own.
        attends_all = getattr(config, "use_bidirectional_attention", None) == "all"
        is_decoder = not causal and (getattr(module, "is_causal", True) or attends_all)
        return _of_window(window + 1 if is_decoder and window is not None else window, causal)
    # PhiMoE and Qwen2-MoE apply their window by the mask alone, which they make with this function.
    creates = "create_sliding_window_causal_mask" if causal else "create_bidirectional_sliding_window_mask"
    if not hasattr(sys.modules[type(module).__module__], creates):
        return LayerMask()
    return layer_masks(config, causal)[index if isinstance(index, int) else 0]


def is_causal(module: nn.Module) -> bool:
    """Whether an attention module attends no later token. transformers draws the masks of all by config.is_causal."""
    return bool(getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True))


def _mask_of(config: Any, kind: str, causal: bool) -> LayerMask:
    if kind == "chunked_attention":
        return LayerMask(chunk=config.attention_chunk_size)
    window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
    # transformers: q - window < k <= q, but |q - k| <= window for encoders, whose modules hand on window + 1.
    return _of_window(window if window is None or causal else window + 1, causal)


def _of_window(window: int | None, causal: bool) -> LayerMask:
    return LayerMask() if window is None else LayerMask(window=window, causal=causal)
