"""The position ids that a model would make itself for a batch without any: a shard does not know its positions.

Models with rotary embeddings count 0, 1, ... Those with learned or sinusoidal positions take ids as an argument (GPT-2,
BERT), or make them for an embedding module, which ringtile then hands the right ones (BART). Some count otherwise: OPT
the tokens of the attention mask, RoBERTa those that are not padding.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringtile.errors import RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.patches import Patches
from ringtile.stream.attend import running_chunk

logger = logging.getLogger("ringtile")

_COUNTS_MASK = "OPTLearnedPositionalEmbedding"
_COUNTS_IDS = "create_position_ids_from_input_ids"  # the method of RoBERTa's embeddings, and of those made after it


class Positions:
    """How one model numbers the tokens of a batch without position ids."""

    def __init__(self, model: PreTrainedModel, patches: Patches) -> None:
        self._name = type(model).__name__
        modules = list(model.modules())
        rotary = bool(_rotary_embeddings(model))
        ours = type(model).__module__.startswith("transformers.models.")  # code whose ways of counting are known
        takes_ids = "position_ids" in inspect.signature(type(model).forward).parameters
        self._counted_inside = [
            module
            for module in modules
            if ours
            and not rotary
            and not takes_ids
            and isinstance(module, nn.Embedding)
            and "position_ids" in inspect.signature(module.forward).parameters
        ]
        for module in self._counted_inside:
            patches.wrap(module, "forward", _with_global_ids)
        self._counts_mask = any(type(module).__name__ == _COUNTS_MASK for module in modules)
        config = model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        of_kinds = [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]  # of layers
        unscaled = rotary and all(x.get("rope_type", "default") == "default" for x in of_kinds)
        self._trained_on = getattr(config, "max_position_embeddings", None) if unscaled else None
        self._counts_ids = next((module for module in modules if hasattr(module, _COUNTS_IDS)), None)

    def check_largest(self, position: int) -> None:
        """Warns once of a position that the rotary embeddings of a pretrained model have never been trained on."""
        if self._trained_on is not None and position >= self._trained_on:
            logger.warning(
                f"ringtile: a batch reaches position {position}, and {self._name} was made for "
                f"{self._trained_on} (max_position_embeddings), without scaled rotary embeddings; for a pretrained "
                f"model, set rope_parameters in its config, such as YaRN's, before it is loaded"
            )
            self._trained_on = None

    def of_batch(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """The ids (B, S) for a batch of a model that does not count 0, 1, ...; None: it does, or the batch has ids.

        Raises RefusedError for ids that the model would ignore, and where it would need the token ids.
        """
        if inputs.get("position_ids") is not None:
            if self._counted_inside:
                raise RefusedError(
                    f"the batch holds position_ids, which {self._name} ignores: it counts positions itself; remove "
                    f"them, and pack no documents for this model"
                )
            return None
        attention_mask, input_ids = inputs.get("attention_mask"), inputs.get("input_ids")
        if self._counts_mask and attention_mask is not None:
            held: Tensor = attention_mask.long()
            return held.cumsum(dim=1) * held - 1
        if self._counts_ids is not None:
            if input_ids is None:
                raise RefusedError(
                    f"{self._name} reads its positions off input_ids, and the batch has none; add position_ids (B, S)"
                )
            positions: Tensor = getattr(self._counts_ids, _COUNTS_IDS)(input_ids, self._counts_ids.padding_idx)
            return positions
        return None


def _with_global_ids(
    original: Callable[..., Any], *args: Any, position_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    batch = active_batch()
    if batch is not None:
        assert batch.position_ids is not None
        position_ids = batch.position_ids[0]  # (N,), as the model passes them: all rows count alike
    return original(*args, position_ids=position_ids, **kwargs)


# ---- rotary embeddings that depend on the length of a sequence ----------------------------------


def pin_rope_length(model: PreTrainedModel, patches: Patches) -> None:
    """Shows the largest global position to rotary embeddings whose frequencies depend on the sequence length.

    "dynamic" and "longrope" read the length off their position ids, and the ids of a shard would give each rank other
    frequencies. The largest global position is appended to the ids, and its row dropped from the result.
    """
    for rotary in _rotary_embeddings(model):
        if depends_on_length(rotary):
            patches.wrap(rotary, "forward", _with_global_length)


def depends_on_length(rotary: nn.Module) -> bool:
    """Whether the frequencies of a rotary embedding, of all layers or of a type of layers, depend on the length."""
    return any(kind in str(getattr(rotary, "rope_type", "")) for kind in ("dynamic", "longrope"))


def _with_global_length(
    original: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    batch = active_batch()
    if batch is None:
        cos, sin = original(x, position_ids, *args, **kwargs)
        return cos, sin
    last = position_ids.new_full((position_ids.size(0), 1), batch.max_position)
    cos, sin = original(x, torch.cat([position_ids, last], dim=1), *args, **kwargs)
    return cos[:, :-1], sin[:, :-1]


def _rotary_embeddings(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]


# ---- the temperature of queries that attend by position without a rotary embedding (Llama 4; arXiv:2501.19399) -------

# Llama 4 multiplies a query by 1 + attn_scale log(1 + floor((i + 1) / floor_scale)), and takes for i the place of the
# token in the tensor that it was given. In a shard that is not its place in the row. So for a sharded batch the module
# leaves its queries alone, and the attention function multiplies them instead.


def leave_temperature(model: nn.Module, patches: Patches) -> None:
    """Turns the temperature of every module off while it runs on a sharded batch, or on a chunk."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            patches.wrap(module, "forward", _without_temperature)
            patches.set(module, "ringtile_temperature", True)


def scaled(module: nn.Module, query: Tensor, places: Tensor | None) -> Tensor:
    """query (B, H, N, D), times its temperature if the module was to multiply it; with the rounding of transformers.

    places (N,): of the tokens in their row, of which a chunk has a part; None: they are those of whole rows.
    """
    chunk = running_chunk()
    if not getattr(module, "ringtile_temperature", False) or (chunk is None and places is None):
        return query
    if chunk is not None:
        tokens = chunk.tokens
        places = torch.arange(tokens.start, tokens.stop) if places is None else places[tokens]
    assert places is not None
    settings: Any = module
    counts = places.to(query.device).float() + 1.0
    factor = torch.log1p(torch.floor(counts / settings.floor_scale)) * settings.attn_scale + 1.0
    product: Tensor = query * factor[:, None]
    return product.to(query.dtype)


def _without_temperature(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """original: the module's own method."""
    module: Any = original.__self__  # type: ignore[attr-defined]
    if active_batch() is None and running_chunk() is None:
        return original(*args, **kwargs)
    module.attn_temperature_tuning = False
    try:
        return original(*args, **kwargs)
    finally:
        module.attn_temperature_tuning = True
