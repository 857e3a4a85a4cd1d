"""Dropout that does not depend on the world: modules and attention of a model draw from counters, not from a generator.

Whether a feature of a token stays is a function of the seed, the step, the module, the token's row and position in the
global batch, and the feature; for a weight of attention, of its head and the key's position (docs/design/dropout.md).
So one process that is a group and any number of ranks drop the same, in every layout and tile, and when a checkpointed
layer is computed again.

Shape letters: B batch, N local tokens, T = B*N tokens flattened, F features.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations.neftune import neftune_post_forward_hook

from ringtile import ops
from ringtile.attn.call import AttentionDropout
from ringtile.errors import RefusedError
from ringtile.hf import attention
from ringtile.hf.batch import CHECKPOINTING, LayerRun, active_batch, layer_run, main_input
from ringtile.hf.feature import HOOKS
from ringtile.hf.model import drops_attention, text_modules
from ringtile.hf.patches import Patches
from ringtile.tiled.tiles import running_tile
from ringtile.torch_ops import random_numbers

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}  # in the path of a module inside torch's wrappers
_OF_ATTENTION = {"attn_dropout", "attention_dropout"}  # names of modules whose rate attention reads (GPT-2)


@dataclass(eq=False)
class _Calls:
    """How often each dropout was called since a layer, or the model, was entered."""

    recomputed: bool  # entered inside a backward
    run: LayerRun | None = None  # in which it was entered, if that called no hook
    of: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class _Tokens:
    """The tokens of one forward pass in training."""

    step: int
    shape: tuple[int, int]  # (B, N)
    seq_len: int  # of the row, without the layout's padding
    places: Tensor  # int64 (T, 2): row in the step's batch, position in the row
    outside: _Calls = field(default_factory=lambda: _Calls(recomputed=False))  # of all layers
    inside: dict[nn.Module, _Calls] = field(default_factory=dict)  # of each layer, since it was last entered
    totals: dict[tuple[str, int], int] = field(default_factory=dict)  # calls of the forward, by module and tile

    @property
    def rows(self) -> Tensor:
        """int64 (B,): in the step's batch."""
        return self.places.view(*self.shape, 2)[:, 0, 0].contiguous()


class CountedDropout(TrainerCallback):
    """The dropout modules of one Trainer's model. data_index: which of data_size different batches this rank gets."""

    def __init__(self, trainer: Trainer, data_index: int, data_size: int) -> None:
        self._trainer, self._data_index, self._data_size = trainer, data_index, data_size
        self._counted: dict[nn.Module, Any] = {}  # the forwards that replace torch's
        self._in_step = False  # inside compute_loss
        self._num_rows = 0  # of this rank, in the forward passes of this step so far
        self._tokens: _Tokens | None = None  # inside the model now
        self._has_head = False  # whether modules drop outside of `entry`
        self._graphs: list[_Tokens] = []  # of the forward passes whose backward may follow

    def __deepcopy__(self, memo: Any) -> CountedDropout:
        """That of a copy of the model is the same, too: it is no copy of the Trainer."""
        return self

    def install(self, base: PreTrainedModel, entry: nn.Module, patches: Patches) -> None:
        """Replaces the forward of every dropout of the model, and tells its attention modules what to drop.

        entry: the module that receives a rank's part.
        """
        layers = {path: module for path, module in base.named_modules() if _is_layer(path, base)}
        hooked: set[nn.Module | None] = {None}
        drops = drops_attention(base)
        attentive = {module for _, module in text_modules(base) if drops and "Attention" in type(module).__name__}
        for path, module in text_modules(base):
            layer = next((layers[prefix] for prefix in _prefixes(path) if prefix in layers), None)
            name = _without_wrappers(path)
            if module in attentive:
                patches.set(module, attention.DROPOUT, self._of_attention(name, layer))
            elif is_counted(path, module):
                patches.set(module, "forward", MethodType(self._forward(name, layer), module))
                self._counted[module] = module.forward
            else:
                continue
            if layer is not None and layer not in hooked:
                hooked.add(layer)
                patches.on_restore(layer.register_forward_pre_hook(self._enter_layer).remove)
        self._has_head = not self._counted.keys() <= set(entry.modules())
        trainer = self._trainer
        alpha: float | None = trainer.neftune_noise_alpha
        if alpha is not None:
            self._install_noise(base, alpha, patches)
        if not self._counted and not attentive and alpha is None:
            return
        patches.wrap(trainer, "compute_loss", self._compute_loss)
        patches.add_callback(trainer, self)
        patches.on_restore(entry.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
        patches.on_restore(entry.register_forward_hook(self._leave, always_call=True).remove)

    @property
    def drawn(self) -> tuple[Any, ...]:
        """What this step has drawn so far; set it back, and the next forward pass draws the same again."""
        return self._num_rows, self._tokens, tuple(self._graphs)

    @drawn.setter
    def drawn(self, drawn: tuple[Any, ...]) -> None:
        self._num_rows, self._tokens, graphs = drawn
        self._graphs = [*graphs]

    # ---- one step -------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._num_rows = 0

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._in_step, self._graphs = True, []
        try:
            return original(*args, **kwargs)
        finally:
            self._in_step, self._tokens = False, None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pass of a rank's part of a batch begins."""
        self._tokens = None
        if not self._in_step:
            self._graphs = []  # the backward that follows is of other code, and so was the forward
            return
        batch = active_batch()
        main = main_input(args, kwargs)
        if not module.training or main is None or main.dim() < 2:
            return
        num_rows, num_tokens = main.shape[:2]
        first = self._num_rows * self._data_size + self._data_index * num_rows
        self._num_rows += num_rows
        rows = torch.arange(first, first + num_rows, device=main.device)
        positions = torch.arange(num_tokens, device=main.device) if batch is None else batch.places
        places = torch.stack([rows[:, None].expand(-1, num_tokens), positions.expand(num_rows, -1)], dim=-1)
        step, seq_len = self._trainer.state.global_step, num_tokens if batch is None else batch.seq_len
        places = places.flatten(0, 1).contiguous()
        self._tokens = _Tokens(step, (num_rows, num_tokens), seq_len, places)
        if torch.is_grad_enabled():
            self._graphs.append(self._tokens)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """What runs outside of `entry` is a head that reads whole rows, on every rank."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None and self._has_head:
            rows, positions = tokens.rows, torch.arange(tokens.seq_len, device=tokens.places.device)
            shape = rows.numel(), tokens.seq_len
            places = torch.stack([rows[:, None].expand(shape), positions.expand(shape)], dim=-1).flatten(0, 1)
            self._tokens = _Tokens(tokens.step, shape, tokens.seq_len, places.contiguous())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter_layer(self, layer: nn.Module, args: Any) -> None:
        tokens, recomputes = self._tokens_now()
        if tokens is not None:
            tokens.inside[layer] = _Calls(recomputes)

    def _tokens_now(self) -> tuple[_Tokens | None, bool]:
        """The tokens inside the model, and whether this is a backward, which computes the last forward pass again."""
        if torch._C._current_graph_task_id() == -1:
            return self._tokens, False
        if len(self._graphs) > 1:
            raise RefusedError(
                f"a loss of {len(self._graphs)} forward passes, with dropout, and layers that are computed again in "
                f"the backward; expected one forward pass: turn off {CHECKPOINTING} and tiled_mlp, or set the "
                f"model's dropout to 0"
            )
        return (self._graphs[0] if self._graphs else None), True

    # ---- one module -----------------------------------------------------------------------------

    def _of_call(self, name: str, layer: nn.Module | None, x: Tensor) -> tuple[_Tokens, Tensor, int] | None:
        """The tokens inside the model, the places of those of x, and the stream that a call draws from; None: it does
        not draw from counters."""
        tokens, recomputes = self._tokens_now()
        places = None if tokens is None else _places_of(x, tokens)
        if tokens is None or places is None:
            return None
        call = _call_number(name, layer, tokens, recomputes)
        return tokens, places, zlib.crc32(name.encode() if call == 0 else f"{name}:{call}".encode())

    def _forward(self, name: str, layer: nn.Module | None) -> Callable[..., Tensor]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(module: Any, input: Tensor) -> Tensor:
            if not module.training or module.p == 0:
                return input
            if (call := self._of_call(name, layer, input)) is None:
                return nn.Dropout.forward(module, input)
            tokens, places, stream = call
            features = input.reshape(places.size(0), -1)
            return ops.dropout(features, places, module.p, self._trainer.args.seed, tokens.step, stream).view_as(input)

        return cast("Callable[..., Tensor]", forward)

    def _install_noise(self, base: PreTrainedModel, alpha: float, patches: Patches) -> None:
        """Adds NEFTune's noise to the embeddings of training steps, in place of transformers' hook."""
        patches.set(self._trainer, "neftune_noise_alpha", None)
        embeddings: Any = base.get_input_embeddings()
        path = next((path for path, module in base.named_modules() if module is embeddings), "embeddings")
        name = _without_wrappers(path) + ":neftune"

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def add_noise(module: Any, args: Any, output: Tensor) -> Tensor:
            if not module.training:
                return output
            if (call := self._of_call(name, None, output)) is None:
                return cast("Tensor", neftune_post_forward_hook(module, args, output))  # type: ignore[no-untyped-call]
            tokens, places, stream = call
            num_features, key = output.size(-1), (self._trainer.args.seed, tokens.step)
            largest = alpha / math.sqrt(tokens.seq_len * num_features)  # padding included, as transformers counts
            return output + _noise(places, num_features, largest, output.dtype, key, stream).view_as(output)

        patches.set(embeddings, "neftune_noise_alpha", alpha)  # which transformers' hook reads
        patches.on_restore(embeddings.register_forward_hook(add_noise).remove)

    def _of_attention(self, name: str, layer: nn.Module | None) -> Callable[[Tensor, float], AttentionDropout | None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def dropout_of(query: Tensor, probability: float) -> AttentionDropout | None:
            """query (B, H, N, D)"""
            if (call := self._of_call(name, layer, query[:, 0])) is None:
                return None
            tokens, _, stream = call
            return AttentionDropout(probability, tokens.rows, self._trainer.args.seed, tokens.step, stream)

        return cast("Callable[[Tensor, float], AttentionDropout | None]", dropout_of)


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def _places_of(x: Tensor, tokens: _Tokens) -> Tensor | None:
    """The places of the tokens of x; None: it holds no vector for each, and torch draws."""
    tile = running_tile()
    places = tokens.places if tile is None else tokens.places[tile.tokens]
    leading = tokens.shape if tile is None else tile.shape
    if (x.dim() == 3 and x.shape[:2] == leading) or (x.dim() == 2 and x.size(0) == places.size(0)):
        return places
    if tile is None and x.dim() == 2 and x.size(0) == tokens.shape[0]:  # one vector for each row, which was pooled
        return torch.stack([tokens.rows, torch.zeros_like(tokens.rows)], dim=-1)
    return None


def _call_number(name: str, layer: nn.Module | None, tokens: _Tokens, recomputes: bool) -> int:
    """How often this module was called before, since its layer was entered, or its tile: the same when recomputed."""
    tile = running_tile()
    region = tokens.outside if layer is None or layer not in tokens.inside else tokens.inside[layer]
    run = layer_run() if recomputes else None
    if layer is not None and run is not None and run.layer is layer and run is not region.run:
        region = tokens.inside[layer] = _Calls(recomputed=True, run=run)
    calls = region.of if tile is None else tile.calls
    call = calls.get(name, 0)
    calls[name] = call + 1
    key = (name, -1 if tile is None else tile.start)
    if not recomputes:
        if tile is not None and tile.repeats and call < tokens.totals.get(key, 0):
            return call
        if call != tokens.totals.get(key, 0):
            raise RefusedError(
                f"{name} runs again on the same tokens, in a layer that the model runs more than once; expected each "
                f"layer to run once: set its dropout to 0 in the model's config"
            )
        tokens.totals[key] = call + 1
        return call
    total = tokens.totals.get(key, 0)
    if total == 1:
        return 0
    if call >= total or (tile is None and not region.recomputed):
        raise RefusedError(
            f"{name} runs {total} times in a layer, of which the backward computes a part again; expected whole layers "
            f"to be checkpointed: use the Trainer's {CHECKPOINTING}, or set its dropout to 0"
        )
    return call


def _noise(
    places: Tensor, num_features: int, largest: float, dtype: torch.dtype, key: tuple[int, int], stream: int
) -> Tensor:
    """NEFTune's noise on embeddings (arXiv:2310.05914): uniform in [-largest, largest], (T, F) of dtype, for the tokens
    at places (T, 2): row and position. In torch's own operations: of one draw a forward pass, a kernel would save
    nothing that is seen."""
    parts = [
        ((words - 2**31).to(torch.float32) * (largest * 2.0**-31)).to(dtype)
        for _, words in random_numbers(places, num_features, key, stream)
    ]
    return torch.cat(parts) if parts else places.new_empty((0, num_features), dtype=dtype)


def is_counted(path: str, module: nn.Module) -> bool:
    """Whether it is a dropout that draws from counters. Not one that may drop otherwise than nn.Dropout, that writes
    into its input, whose rate attention reads, or of an expert, which does not know which tokens it was given: these
    draw as torch does, which the first batch refuses where they run."""
    return (
        type(module) is nn.Dropout
        and module.p > 0
        and not module.inplace
        and path.rpartition(".")[2] not in _OF_ATTENTION
        and "experts" not in path.split(".")
    )


def _is_layer(path: str, base: nn.Module) -> bool:
    """Whether it is an element of an nn.ModuleList that is in no other layer."""
    lists = [prefix for prefix in _prefixes(path) if isinstance(base.get_submodule(prefix), nn.ModuleList)]
    return lists == [path.rpartition(".")[0]]


def _prefixes(path: str) -> list[str]:
    """Of a path, the shorter ones first, without itself."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


TOUCHES = HOOKS | {"forward", "compute_loss", "callbacks", attention.DROPOUT, "neftune_noise_alpha"}
