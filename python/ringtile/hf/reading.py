"""How a model reads a batch: what position ids it makes itself, and which documents of a packed row it tells apart.

A shard does not know its positions. Models with rotary embeddings count 0, 1, ... Those with learned or sinusoidal
positions take ids as an argument (GPT-2, BERT), or make them for an embedding module, which ringtile then hands the
right ones (BART). Some count otherwise: OPT the tokens of the attention mask, RoBERTa those that are not padding.

Where transformers can keep documents apart, they stay apart on the ranks that share a sequence. transformers alone does
so under conditions: a model that makes a cache, as models of images and text do by default, does not, nor does one with
M-RoPE (Qwen2-VL, GLM-4V) that gets position ids without a row for text: there the first batch is compared with ringtile
on one rank.

Shape letters: B batch, S global tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from ringtile.errors import InputError, RefusedError
from ringtile.hf.batch import active_batch
from ringtile.hf.families import JOIN_DOCUMENTS, MAKE_TEXT_ROW, TAKE_TEXT_ROW
from ringtile.hf.keys import IGNORE_INDEX, PADDING
from ringtile.hf.layers import LayerMask
from ringtile.hf.masks import positions_alone_separate, positions_restart
from ringtile.hf.model import rotary_embeddings, text_modules
from ringtile.hf.patches import Patches

logger = logging.getLogger("ringtile")

_COUNTS_MASK = "OPTLearnedPositionalEmbedding"
_COUNTS_IDS = "create_position_ids_from_input_ids"  # the method of RoBERTa's embeddings, and of those made after it


class Reading(NamedTuple):
    """How a model reads a batch."""

    positions_separate: bool = True  # position ids that start again start a document
    takes_rows: bool = False  # it takes position ids (3 or 4, B, S) too
    causal: bool = True  # it attends no later token
    shifts_labels: bool = True  # a token predicts the next label, not its own
    layers: Iterable[LayerMask] = ()  # what its layers attend, whose masks torch.compile cannot make
    besides: frozenset[str] = frozenset()  # what it takes besides text, such as images
    per_token: frozenset[str] = frozenset()  # tensors of the user's (B, S, ...)
    per_row: frozenset[str] = frozenset()  # and (B, ...)


class BatchReader:
    """What one model makes of its batches. Warns once of what is seldom wanted.

    hybrid: whether recurrent layers must keep documents apart too; ringtile then does, whatever the model's masks know.
    logs: whether this process warns.
    """

    def __init__(
        self, model: PreTrainedModel, patches: Patches, *, causal: bool = True, hybrid: bool = False, logs: bool = True
    ) -> None:
        self._name, self._causal, self._logs = type(model).__name__, causal, logs
        self.separate = hybrid or positions_separate(model, causal)  # documents, by position ids; None: not known
        names = {cls.__name__ for cls in _classes(model)}
        self.takes_rows = bool(names & TAKE_TEXT_ROW)  # position_ids (3 or 4, B, S)
        self._makes_text_row = bool(names & MAKE_TEXT_ROW)
        self._said: set[str] = set()
        self._left_checked = False
        modules = list(model.modules())
        rotary = bool(rotary_embeddings(model))
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
            self._say(
                f"ringtile: a batch reaches position {position}, and {self._name} was made for "
                f"{self._trained_on} (max_position_embeddings), without scaled rotary embeddings; for a pretrained "
                f"model, set rope_parameters in its config, such as YaRN's, before it is loaded"
            )
            self._trained_on = None

    def positions(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """The ids (B, S) for a batch of a model that does not count 0, 1, ...; None: it does, or the batch has ids.

        Raises RefusedError for ids that the model would ignore, where it would need the token ids, and where it is not
        known whether it tells the documents of the batch apart.
        """
        self._check_left_padding(inputs.get("attention_mask"), inputs.get("labels"))
        self._check_documents(inputs)
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

    def _check_left_padding(self, attention_mask: Any, labels: Any) -> None:
        """Warns of targets that a token of padding predicts: what it sees is in no implementation the same."""
        if self._left_checked or not self._causal or not isinstance(attention_mask, Tensor) or labels is None:
            return
        begins = attention_mask.ne(0).to(torch.int8).argmax(1) if attention_mask.dim() == 2 else attention_mask[:0]
        padded = begins.nonzero().flatten()
        self._left_checked = bool(len(padded))
        if self._left_checked and bool((labels[padded, begins[padded]] != -100).any()):
            self._say(
                "the first token of a row that is padded on the left keeps its label, which the padding before it "
                "predicts: every implementation of attention computes another loss of it. Set that label to -100 in "
                "your data collator, as for a row without padding, whose first token nothing predicts"
            )

    def lacks_text_row(self, inputs: Mapping[str, Any]) -> bool:
        """Whether a model's own masks do not tell the documents of a batch apart, but would by a first row of text."""
        if not self.takes_rows or not positions_restart(inputs):
            return False
        position_ids: Tensor = inputs["position_ids"]
        return position_ids.size(0) == 3 if position_ids.dim() == 3 else not self._makes_text_row

    def _check_documents(self, inputs: Mapping[str, Any]) -> None:
        """Warns of documents of a row that attend each other, as in one process, which is seldom wanted."""
        if self.separate or not positions_alone_separate(inputs):
            return
        name, add = self._name, "add cu_seq_lens_q and cu_seq_lens_k to the batch (in transformers, "
        add += "DataCollatorWithFlattening(return_flash_attn_kwargs=True))"
        if self.separate is None:
            raise RefusedError(
                f"position_ids alone separate the documents of a row, and whether the attention of {name} sees them is "
                f"not known; expected documents that are told apart in another way: {add}"
            )
        self._say(
            f"the documents of a packed row attend each other, with ringtile and without: {name} hands no position ids "
            f"to its masks. To separate them, {add}"
            + (", or load the model with flash attention" if self._causal else "")
        )

    def _say(self, message: str) -> None:
        if self._logs and message not in self._said:
            self._said.add(message)
            logger.warning(message)


def _with_global_ids(
    original: Callable[..., Any], *args: Any, position_ids: Tensor | None = None, **kwargs: Any
) -> Any:
    batch = active_batch()
    if batch is not None:
        assert batch.position_ids is not None
        position_ids = batch.position_ids[0]  # (N,), as the model passes them: all rows count alike
    return original(*args, position_ids=position_ids, **kwargs)


# ---- packed documents ----------------------------------------------------------------------------


def positions_separate(model: PreTrainedModel, causal: bool = True) -> bool | None:
    """Whether documents packed into a row are told apart by position ids that start again; None: not known.

    Flash attention looks at the position ids itself. Other attention follows the masks that the model makes, and some
    models (GPT-OSS, OPT, Bloom, all encoders) hand these no position ids: in one process the documents of a row attend
    each other.
    """
    if not causal:  # ModernBERT keeps the ids from flash attention, EuroBERT hands them on
        return None if _is_flash(model) else False
    if _is_flash(model):
        return True
    classes = _classes(model)
    if JOIN_DOCUMENTS & {cls.__name__ for cls in classes}:
        return False
    return None if any(map(_is_unknown, classes)) else True


def _classes(model: PreTrainedModel) -> set[type]:
    """Those of the modules that run for text, and the classes that they extend."""
    return {cls for _, module in text_modules(model) for cls in type(module).__mro__}


def _is_unknown(cls: type) -> bool:
    """Whether its own forward makes masks, and it is no class of transformers, which families.py lists."""
    forward = inspect.unwrap(vars(cls).get("forward", nn.Identity.forward))
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return not cls.__module__.startswith("transformers.") and any(
        name.endswith("causal_mask") or name == "mask_function" for name in names
    )


def _is_flash(model: PreTrainedModel) -> bool:
    return "flash" in str(model.config._attn_implementation)


def tensors_per_token(
    inputs: Mapping[str, Any], main: Tensor, reading: Reading, positions: Tensor | None
) -> dict[str, Tensor]:
    """Return the global tensors with one entry per token: the keys of PADDING, those of the user, and labels that are
    not to be shifted. positions (B, S): the model would make these instead of 0, 1, .... InputError: other shapes."""
    batch_size, seq_len = main.shape[:2]
    for name in ("input_ids", "inputs_embeds", "labels", "shift_labels"):
        if inputs.get(name) is not None and inputs[name].shape[:2] != (batch_size, seq_len):
            raise InputError(f"{name} is {tuple(inputs[name].shape)}; expected ({batch_size}, {seq_len}) as the batch")
    for names, size in ((reading.per_token, (batch_size, seq_len)), (reading.per_row, (batch_size,))):
        for name in names & inputs.keys():
            held = getattr(inputs[name], "shape", None)
            if inputs[name] is not None and (held is None or held[: len(size)] != size):
                what = type(inputs[name]).__name__ if held is None else tuple(held)
                raise InputError(f"{name} is {what}; expected ({', '.join(map(str, size))}, ...), as declared")
    per_token = {name: inputs[name] for name in {*PADDING, *reading.per_token} if inputs.get(name) is not None}
    if "position_ids" not in per_token:
        counted = torch.arange(seq_len, device=main.device)[None]
        per_token["position_ids"] = counted if positions is None else positions.to(main.device)
    per_token["position_ids"] = _rows(per_token["position_ids"], batch_size, seq_len, reading.takes_rows)
    if inputs.get("labels") is not None and not reading.shifts_labels:
        per_token["labels"] = inputs["labels"]
    elif inputs.get("labels") is not None and "shift_labels" not in per_token:
        per_token["shift_labels"] = functional.pad(inputs["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    return per_token


def _rows(position_ids: Tensor, batch_size: int, seq_len: int, takes_rows: bool) -> Tensor:
    """(B, S) from (B, S) or from (1, S), which models accept for all rows; likewise behind 3 or 4 rows of M-RoPE."""
    known = position_ids.dim() == 2 or (takes_rows and position_ids.dim() == 3 and position_ids.size(0) in (3, 4))
    if not known or position_ids.size(-2) not in (1, batch_size) or position_ids.size(-1) != seq_len:
        raise InputError(
            f"position_ids are {tuple(position_ids.shape)}; expected ({batch_size}, {seq_len}) or (1, {seq_len})"
            + (" or, for the M-RoPE of this model, either behind a dimension of 3 or 4" if takes_rows else "")
        )
    return position_ids.expand(*position_ids.shape[:-2], batch_size, seq_len)
