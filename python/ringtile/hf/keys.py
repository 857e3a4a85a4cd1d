"""The keys of a batch, which are also arguments that models hand on: what each is, in one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ringtile.hf.families import CACHES

IGNORE_INDEX = -100  # transformers' label of a position without a target
LAST = "that of the last token"  # a model must not see padding of zeros: the norm of a zero vector has no gradient
MASK = "interval_mask"  # an IntervalMask, which says alone who attends whom; beside it only padding counts


class Key(NamedTuple):
    """What a key is to a model that computes on a shard."""

    padding: int | str | None = None  # it has an entry for each token (B, S, ...), of which padding has this value
    documents: bool = False  # it says which tokens attend which
    loss: bool = False  # the loss alone reads it
    output: bool = False  # it says what is returned, or kept, of what is computed in any case
    refused: str = ""  # a switch: why no shard may have it set
    text: bool = True  # it says nothing of images or sound


KEYS = {
    "input_ids": Key(padding=LAST),
    "inputs_embeds": Key(padding=LAST),
    "position_ids": Key(padding=LAST, documents=True),
    "attention_mask": Key(padding=0, documents=True),
    "token_type_ids": Key(padding=LAST, text=False),  # encoders embed it; decoders (Gemma 3) tell images by it
    "shift_labels": Key(padding=IGNORE_INDEX, loss=True),
    **dict.fromkeys(("labels", "num_items_in_batch"), Key(loss=True)),
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"), Key(documents=True)),
    **dict.fromkeys(("max_length_q", "max_length_k", MASK), Key(documents=True)),
    **dict.fromkeys(("use_cache", "cache_position", "return_dict", "output_router_logits"), Key(output=True)),
    **dict.fromkeys(("output_hidden_states", "skip_logits"), Key(output=True)),  # the latter is of Liger's evaluation
    **dict.fromkeys(CACHES, Key(refused="a cache holds full sequences")),
    "output_attentions": Key(output=True, refused="attention weights are never formed"),
    "logits_to_keep": Key(output=True, refused="the last positions lie on one rank"),
}
OWN = "name it in per_token or per_row, if it has an entry for each token (B, S, ...) or each row (B, ...)"  # advice
PADDING = {name: key.padding for name, key in KEYS.items() if key.padding is not None}
DOCUMENTS = frozenset(name for name, key in KEYS.items() if key.documents)
LOSS = frozenset(name for name, key in KEYS.items() if key.loss)
OUTPUT = frozenset(name for name, key in KEYS.items() if key.output)
TEXT = frozenset(name for name, key in KEYS.items() if key.text)
REFUSED = {name: key.refused for name, key in KEYS.items() if key.refused}
# Of one row that is a tree: as IntervalMask.tree takes it, or as TRL's TreeRow.pack makes it.
TREE = ("tree_parents", "tree_lengths")
SEGMENTS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


def key_of_tree(inputs: Mapping[str, Any]) -> str | None:
    """The key by which a batch says that its row is a tree; None: it is none."""
    return TREE[0] if TREE[0] in inputs else SEGMENTS[0] if SEGMENTS[0] in inputs else None


def is_scalar(value: Any) -> bool:
    """Whether a shard may get the value as it is. Nested metadata may hold tensors of the whole sequence."""
    return (
        value is None or isinstance(value, bool | int | float | str) or (isinstance(value, Tensor) and value.dim() == 0)
    )
