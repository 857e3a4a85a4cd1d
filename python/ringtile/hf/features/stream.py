"""Runs the layers of a model on chunks of tokens: `ringtile.stream_layers` and the Trainer's `stream: true`.

A layer's own forward runs on each chunk, and reaches ringtile's attention by transformers' AttentionInterface: nothing
is looked for inside of it.

Shape letters: B batch, S tokens, E hidden size.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from ringtile.errors import ConfigError, InputError, RefusedError, shown
from ringtile.hf import attention
from ringtile.hf.batch import CHECKPOINTING, STREAMED, active_batch, as_now
from ringtile.hf.config import Config
from ringtile.hf.drawn_masks import intervals_of
from ringtile.hf.families import CACHES, MIXERS, UNKNOWN_RECURRENCES, WHOLE_SEQUENCES
from ringtile.hf.feature import Feature
from ringtile.hf.group import deepspeed_shards_sequences
from ringtile.hf.layers import mixers, refuse_indexers
from ringtile.hf.masks import mask_of_batch
from ringtile.hf.model import attends_causally, base_model, refuse_modules, text_modules
from ringtile.hf.patches import Patches
from ringtile.hf.tiled_forward import TiledForward, gather_as_one, own_forward, with_recorded
from ringtile.sequence.layout import named_layout
from ringtile.sequence.sharded import ShardedSequence
from ringtile.stream.attend import WHOLE, attends_no_later_chunk, running_chunk
from ringtile.stream.layer import LayerArguments, run_chunks, run_tokens
from ringtile.tiled.host import HostCopies, to_host
from ringtile.tiled.mlp import check_parts
from ringtile.tiled.tiles import tile_limit

logger = logging.getLogger("ringtile")
NAME = "ringtile_stream"
# Where the arguments of layers have their tokens; tensors of other names are refused.
_TOKEN_DIMS = {"position_embeddings": -2, "position_ids": -1, "per_layer_input": 1, "original_hidden_states": 1}
_CACHES = (*CACHES, "layer_past")


def stream_layers(model: nn.Module, stream_tokens: int = 16384) -> Patches:
    """Make every layer of the model run on chunks of stream_tokens tokens; `.restore()` on the result undoes it.

    Of all tokens exist, besides the layers' inputs and outputs, only one layer's keys and values, and in the backward
    their gradients in float32. The backward runs each layer again, chunk by chunk, last chunk first. Attention is
    ringtile's. The embedding and the norm behind the layers run on such chunks too. With `offload_activations` the
    layers' inputs and outputs wait in host memory.

    Call this before deepspeed.initialize: ZeRO-3 then gathers a layer's parameters together.

    Without gradients a layer that is given a cache runs whole; in training it is given none.

    InputError: stream_tokens is below 1. RefusedError: the model's layers mix tokens otherwise than by causal
    attention through transformers' AttentionInterface; raised in the forward too, for what only shows there.
    """
    return Patches.of(lambda patches: _stream(model, stream_tokens, patches))


def install_stream(trainer: Trainer, base: PreTrainedModel, config: Config, patches: Patches) -> None:
    """`stream: true`. Attention is that of the Trainer's group, of one rank or more. ConfigError, RefusedError."""
    if trainer.args.torch_compile:
        raise ConfigError(
            f"stream is true and {type(trainer).__name__} uses torch_compile; expected one of the two: the loop over a "
            f"layer's chunks is no graph"
        )
    if deepspeed_shards_sequences(trainer.accelerator):
        raise ConfigError(
            "stream is true and DeepSpeed shards the sequences, by attention of its own; expected one of the two"
        )
    if getattr(trainer.args, CHECKPOINTING) and trainer.args.process_index == 0:
        logger.info(f"stream: {CHECKPOINTING} has no effect on streamed layers, which run again in the backward anyway")
    install(base, config.tile_tokens, patches, recurs=True)


def _stream(model: nn.Module, stream_tokens: int, patches: Patches) -> None:
    base = base_model(model)
    attention.refuse_own_functions(module for _, module in text_modules(base))
    AttentionInterface.register(NAME, attention.attention_forward)
    AttentionMaskInterface.register(NAME, draw_mask)
    before = base.config._attn_implementation
    patches.on_restore(lambda: base.set_attn_implementation(before))
    install(base, stream_tokens, patches)
    base.set_attn_implementation(NAME)
    attention.leave_temperature(base, patches)
    if base.config.get_text_config()._attn_implementation != NAME:
        raise RefusedError(f"{type(base).__name__} does not attend through transformers' AttentionInterface: {WHOLE}")


def install(base: PreTrainedModel, stream_tokens: int, patches: Patches, *, recurs: bool = False) -> None:
    """Replaces the forward of each layer by one that runs on chunks. recurs: recurrent layers call ringtile's functions
    (features/recurrent.py)."""
    if isinstance(stream_tokens, bool) or not isinstance(stream_tokens, int) or stream_tokens < 1:
        raise InputError(f"stream_tokens is {shown(stream_tokens)}, expected a whole number of tokens, at least 1")
    layers = find_layers(base)
    _check(base, layers, recurs)
    for name, layer in layers.items():
        gather_as_one(layer, patches)
        forward = _StreamedLayer(name, own_forward(name, layer), stream_tokens)
        patches.set(layer, "forward", MethodType(forward, layer))
        patches.set(layer, STREAMED, None)
    for name, module in _beside(base, layers).items():
        patches.set(
            module, "forward", MethodType(_StreamedTokens(name, own_forward(name, module), stream_tokens), module)
        )
        patches.set(module, STREAMED, None)


def chunk_tokens_of(model: nn.Module) -> int | None:
    """The tokens of a chunk of the layers; None: they are not streamed."""
    forwards = (getattr(vars(module).get("forward"), "__func__", None) for module in model.modules())
    return next((forward.tokens for forward in forwards if isinstance(forward, _StreamedLayer)), None)


def switch_off(model: nn.Module) -> None:
    """Makes layers that are streamed run whole, as in a run that nothing tiles."""
    for module in model.modules():
        forward = getattr(vars(module).get("forward"), "__func__", None)
        if isinstance(forward, _StreamedLayer | _StreamedTokens):
            vars(module)["forward"] = MethodType(replace(forward, tokens=0), module)


def find_layers(base: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of a text model, by name: of transformers' GradientCheckpointingLayer, those that are in no other."""
    found: dict[str, nn.Module] = {}
    for name, module in text_modules(base):
        if isinstance(module, GradientCheckpointingLayer) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _beside(base: PreTrainedModel, layers: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The embedding, and the norms next to the list of layers, by name: what runs before and behind the layers."""
    embedding = base.get_input_embeddings()
    lists = {name.rpartition(".")[0] for name in layers}
    owners = {name.rpartition(".")[0] for name in lists}
    found = {
        name: module
        for name, module in base.named_modules()
        if (module is embedding and _is_plain(module))
        or (type(module).__name__.endswith("Norm") and name.rpartition(".")[0] in owners)
    }
    return {name: module for name, module in found.items() if "forward" not in vars(module)}


def _is_plain(embedding: nn.Module) -> bool:
    """Whether the gradient of its weight is a sum over tokens, and the weight whole."""
    return (
        isinstance(embedding, nn.Embedding)
        and not (embedding.sparse or embedding.scale_grad_by_freq or embedding.max_norm)
        and not isinstance(embedding.weight, DTensor)
    )


def _check(base: PreTrainedModel, layers: dict[str, nn.Module], recurs: bool) -> None:
    """RefusedError, naming the layer, for what shows before it runs."""
    model, config = type(base).__name__, base.config.get_text_config()
    if not layers:
        raise RefusedError(f"{model} has no layer of transformers' GradientCheckpointingLayer: {WHOLE}")
    attends_causally(base)
    if getattr(config, "num_kv_shared_layers", 0):
        raise RefusedError(f"{model} shares keys and values between layers (num_kv_shared_layers): {WHOLE}")
    refuse_modules(base, WHOLE_SEQUENCES)
    refuse_indexers(model, base.named_modules(), lambda: WHOLE)
    for name, layer in layers.items():
        for path, part in layer.named_modules():
            kind = type(part).__name__
            if (kind in MIXERS and not recurs) or kind in UNKNOWN_RECURRENCES:
                raise RefusedError(
                    f"{name}.{path} is a {kind}, whose state goes on from chunk to chunk, which ringtile's recurrences "
                    f"do in a Trainer: {WHOLE}"
                )
        check_parts(layer, "streamed layer", "the layer", mixers(layer.named_modules()))


@dataclass(frozen=True)
class _StreamedLayer(TiledForward):
    """The forward of a layer."""

    tokens: int  # of a chunk; 0: it runs whole

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names = [*inspect.signature(self.own_forward).parameters][1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x, limit = next(iter(given.values()), None), tile_limit()
        if running_chunk() is not None or limit == 0 or not self.tokens:
            return self.own_forward(module, *args, **kwargs)
        for cache in _CACHES:
            if given.get(cache) is not None:
                if not (module.training and torch.is_grad_enabled()):
                    return self.own_forward(module, *args, **kwargs)
                given[cache] = None
        if not isinstance(x, Tensor) or x.dim() != 3 or x.numel() == 0:
            got = tuple(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise RefusedError(f"{self.name} is given hidden states {got}; expected (batch, tokens, hidden): {WHOLE}")
        args, kwargs = (), dict([*given.items()][1:])
        rest = self._rest(kwargs, x)
        tokens = min(self.tokens, limit or self.tokens)
        batch, sequence = active_batch(), getattr(given.get("attention_mask"), attention.SEQUENCE, None)
        if batch is not None and sequence is None:
            sequence = batch.sequence
        if batch is None and _is_in_a_block():
            raise RefusedError(
                f"{self.name} is streamed inside of ringtile.context_parallel, which sees no attention of its chunks; "
                f"expected ringtile.sequence_log_probs or a Trainer with stream: true, or layers that are not streamed"
            )
        copies: HostCopies | None = getattr(module, STREAMED)
        hidden = x if copies is None else to_host(x, copies)
        fixed = None if batch is None else batch.chunk_tokens
        tokens = fixed or tokens
        how: dict[str, Any] = {
            "copies": copies,
            # Of fixed chunks two: with one, dk and dv are sums over chunks of queries, which ranks cannot all add.
            "one_pass": not fixed and (sequence is None or attends_no_later_chunk(sequence, tokens)),
            "inside": as_now(),
        }
        return with_recorded(
            self._uncheckpointed,
            lambda forward: run_chunks(self.name, module, forward, hidden, rest, tokens, **how),
        )

    def _uncheckpointed(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, without its checkpoint: it runs again anyway."""
        with _without_checkpoints(module):
            return self.own_forward(module, *args, **kwargs)

    def _rest(self, given: dict[str, Any], x: Tensor) -> LayerArguments:
        """The arguments besides the hidden states. RefusedError names one whose tokens are not known."""
        leaves, spec = pytree.tree_flatten(((), given))
        names = [name for name, value in given.items() for _ in pytree.tree_leaves(value)]
        return LayerArguments(
            leaves, [self._dim(name, leaf, x) for name, leaf in zip(names, leaves, strict=True)], spec
        )

    def _dim(self, name: str, leaf: Any, x: Tensor) -> int | None:
        dim = _TOKEN_DIMS.get(name)
        if name == "attention_mask" and isinstance(leaf, Tensor) and leaf.dim() == 2:
            dim = -1  # of padding, which recurrent layers are given
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.numel() == 0:
            return None
        if dim is None and name in attention.WITHOUT_EFFECT:
            return None
        if dim is None or leaf.dim() < 2 or leaf.size(dim) != x.size(1):
            raise RefusedError(
                f"{self.name} is given {name} {tuple(leaf.shape)} for {x.size(1)} tokens; expected tensors of "
                f"{', '.join(sorted(_TOKEN_DIMS))} only, with an entry for each token: {WHOLE}"
            )
        return dim


@dataclass(frozen=True)
class _StreamedTokens(TiledForward):
    """The forward of a module that takes one tensor, (B, S) or (B, S, E), and processes each token alone."""

    tokens: int

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x: Any = next(iter((*args, *kwargs.values())), None)
        limit, copies = tile_limit(), getattr(module, STREAMED)
        tokens = min(self.tokens, limit or self.tokens)
        is_one = len(args) + len(kwargs) == 1 and isinstance(x, Tensor) and x.dim() in (2, 3) and x.numel() > 0
        is_short = copies is None and (not is_one or x.size(1) <= tokens or not torch.is_grad_enabled())
        if 0 in (limit, self.tokens) or not is_one or is_short:
            return self.own_forward(module, *args, **kwargs)
        return run_tokens(self.name, module, self.own_forward, x, tokens, copies)


@contextlib.contextmanager
def _without_checkpoints(module: nn.Module) -> Iterator[None]:
    on: list[Any] = [part for part in module.modules() if vars(part).get("gradient_checkpointing")]
    for part in on:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in on:
            part.gradient_checkpointing = True


# ---- attention of a model whose batch is not sharded --------------------------------------------


def draw_mask(**kwargs: Any) -> Tensor | None:
    """An empty mask with the intervals that the model draws; for a row that goes on from a cache, transformers' own."""
    seq_len, offset = kwargs["q_length"], kwargs.get("q_offset", 0)
    if seq_len != kwargs["kv_length"] or not isinstance(offset, int) or offset:
        return attention.attention_mask(**kwargs)
    padding = kwargs.get("attention_mask")
    mask = intervals_of(kwargs["mask_function"], seq_len, padding)
    if padding is not None:
        rows = padding.size(0)
        mask = mask & mask_of_batch({"attention_mask": padding.long().cpu()}, rows, seq_len, causal=False)
    empty = attention.empty_mask(kwargs["batch_size"], kwargs["device"])
    setattr(empty, attention.SEQUENCE, ShardedSequence.of(mask, named_layout("contiguous", seq_len, 1)))
    return empty


def _is_in_a_block() -> bool:
    """Whether a torch function mode of this thread shards the attention inside of it."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return any(getattr(mode, "shards_attention", False) for mode in modes)


FEATURE = Feature(
    frozenset({"forward", STREAMED, "_z3_leaf"}),
    lambda run, patches: install_stream(run.trainer, run.base, run.config, patches),
    key="stream",
)
