"""Models of images or sound and text inside `context_parallel`: they get whole inputs, and are sharded where their
language model begins.

Shape letters: B batch, S global tokens, N local tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ringtile.errors import InputError, RefusedError
from ringtile.seam import Cut, language_model, parameters_of
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.sharded import ShardedSequence
from ringtile.torch_context_parallel.mode import RingMode
from ringtile.torch_context_parallel.noticing import ShardedBuffer
from ringtile.transport.groups import transport_of


class Model:
    """A model with a language model inside: as it is called, maybe within DDP or adapters. InputError: it has none."""

    def __init__(self, model: nn.Module) -> None:
        self.called = model
        base = model.module if isinstance(model, DistributedDataParallel) else model
        get_base_model: Any = getattr(base, "get_base_model", None)  # of adapters
        base = base if get_base_model is None else get_base_model()
        found = language_model(base)
        if found is None:
            raise InputError(
                f"{type(base).__name__} has no language model that ringtile knows; expected a transformers model of "
                f"images or sound and text, in which one module has the text configuration and takes inputs_embeds"
            )
        self.name, (_, self.language_model) = type(base).__name__, found

    @contextlib.contextmanager
    def sharded_inside(self, mode: RingMode, sequence: ShardedSequence) -> Iterator[None]:
        """Inside, calls of the model on this thread leave the mode until its language model begins."""
        thread = threading.get_ident()
        parameters = parameters_of(self.language_model)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                mode.is_before = True

        def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != thread:
                return args, kwargs
            with transport_of(sequence.group_name).propagate_errors("context_parallel"):
                if not mode.is_before:
                    raise RefusedError(
                        f"{self.name} runs its language model twice in a forward pass, or was not called itself; "
                        f"expected one call, of the module that context_parallel was given"
                    )
                given = {**dict(zip(parameters, args, strict=False)), **kwargs}
                local = self._local(given, mode, sequence)
            mode.is_before = False
            return (), local

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                mode.is_before = False

        hooks = [
            self.called.register_forward_pre_hook(begin, with_kwargs=True),
            self.language_model.register_forward_pre_hook(cut, with_kwargs=True),
            self.called.register_forward_hook(end, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _local(self, given: Mapping[str, Any], mode: RingMode, sequence: ShardedSequence) -> dict[str, Any]:
        """What the language model is called with, of whole sequences -> of this rank's tokens."""
        cut = Cut(self.name, given, sequence, sequence.seq_len)
        whole: Tensor | None = given.get("position_ids")
        if whole is None:
            whole = torch.arange(sequence.seq_len, device=cut.device)[None]
        positions = cut.positions(whole)
        of_text = [x if x.dim() == 2 else x[0] for x in (positions, whole)]  # M-RoPE's first row counts tokens
        mode.noticing.made_positions = ShardedBuffer(of_text[0], of_text[1], 1)
        mask = given.get("attention_mask")
        return cut.all_but({"attention_mask", "position_ids"}) | {
            "attention_mask": None if _is_said(mask, sequence) else mask,
            "position_ids": positions,
            "use_cache": False,
        }


def _is_said(attention_mask: Any, sequence: ShardedSequence) -> bool:
    """Whether the sequence's mask says what an attention mask (B, S) says; others, which models draw of whole
    sequences, stay. RefusedError: it does not."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return False
    mask = sequence.causal.mask
    if bool((attention_mask == 0).any()) and (mask & IntervalMask.from_padding(attention_mask)) != mask:
        raise RefusedError(
            "attention_mask has padding, which context_parallel must know of: pass it "
            "mask=IntervalMask.from_padding(attention_mask)"
        )
    return True
