"""`ringtile.sequence_log_probs`: log-probabilities of whole rows, for a reinforcement learning loop in plain PyTorch.

The ranks of a group share each row: the model runs on shards inside `context_parallel`, its output projection runs in
tiles, and what comes out is gathered, so that a loop reads and differentiates whole rows, as in one process.

Shape letters: B rows, S tokens of a row, N tokens of a shard, W ranks, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from ringtile import arguments
from ringtile.checksum import checksum
from ringtile.errors import InputError, RefusedError, shown
from ringtile.hf.attention import empty_mask
from ringtile.hf.batch import ShardedBatch, active
from ringtile.hf.features.loss import TiledLogits, not_plain
from ringtile.hf.features.stream import chunk_tokens_of
from ringtile.hf.features.trees import in_chunks
from ringtile.hf.model import depends_on_length, inside_engine
from ringtile.ops import state_dtype
from ringtile.sequence.layout import Layout
from ringtile.sequence.mask import IntervalMask
from ringtile.sequence.plan import to_device
from ringtile.tiled.log_probs import tiled_log_probs
from ringtile.torch_context_parallel.first_block import FirstBlock
from ringtile.torch_context_parallel.group_layouts import Mesh, group_of
from ringtile.torch_context_parallel.mode import entered
from ringtile.torch_context_parallel.plan import ContextParallelPlan
from ringtile.transport.agreement import HeaderValue
from ringtile.transport.groups import Group, transport_of

_NAME = "sequence_log_probs"
_ALONE = ""  # the group of one rank
_IGNORE = -100
_LAYOUTS = ("zigzag", "contiguous")  # whose shards are whole chunks in the order of the sequence
_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models that were compared with one process


def sequence_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    mesh: Mesh | None = None,
    *,
    attention_mask: Tensor | None = None,
    completion_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    layout: str = "zigzag",
    scheme: str = "ring",
    check: bool = True,
    reproducible: bool = False,
) -> Any:
    """Return the log-probability that a causal language model gives to each token of rows that ranks share.

    - model: of transformers, with attn_implementation="sdpa", or any that has get_output_embeddings() and is called as
      model(input_ids=, position_ids=, use_cache=False); bare, or under DDP, FSDP2, ZeRO
      or PEFT.
    - input_ids int64 (B, S): whole and the same on every rank.
    - mesh: a DeviceMesh of one dimension, or a group, whose ranks share each row; None is one rank.
    - attention_mask (B, S): 0 for padding, on either side, 1 for tokens; or the numbers 1, 2, ... of packed documents.
    - completion_mask (B, S): 1 for the tokens that are asked for; without one, all.
    - position_ids (B or 1, S): 0, ..., S - 1 unless given, as the model itself would count them.
    - layout, scheme: as in `context_parallel`.
    - check: before the first call with a model, its forward and backward are compared on up to 512 tokens of the
      longest row, whole and sharded, as `ringtile.check_first_batch` does.
    - reproducible: the log-probabilities and entropies of a row are the same bits on any number of ranks, beside any
      other rows, and with any padding behind it. It takes `ringtile.stream_layers`, whose chunks then hold tokens of
      one row each; scheme "ulysses" and as many kv heads as ranks, or more; layout "zigzag" or "contiguous".

    Returns log_probs (B, S - 1) in float32 (float64 for a float64 model), the same bits on every rank: log_probs[b, t]
    is log softmax(logits / temperature) of token t + 1, given the tokens up to t. It is 0, and has no gradient, where
    completion_mask is 0, where token t + 1 is padding and where it is the first of its row or document. With
    return_entropy, returns (log_probs, entropy), entropy (B, S - 1) in nats of what token t + 1 was drawn from.

    Differentiable once. Every rank computes the same loss of whole rows, as one process would, and calls backward; the
    *mean* of the ranks' gradients is then the gradient of one process. DDP and FSDP2 take that mean, over data-parallel
    ranks too; without an engine, average the gradients over the group. Never more than a tile of logits exists. The
    same weights give the same bits with and without gradients, so exp(new - old) is exactly 1 before the first step.

    Raises InputError; RingMismatchError where ranks have different rows, masks or options; MaskNotExpressibleError for
    padding inside a document; RefusedError for a model that does not compute on shards what one process does, for an
    output projection that is no plain Linear or whose logits the model does more with than to scale and cap them; and
    what `context_parallel` raises.
    """
    group: Group = _ALONE if mesh is None else group_of(mesh)
    transport = transport_of(group)
    with transport.propagate_errors(_NAME):
        temperature = arguments.check_number("temperature", temperature)
        rows = _Rows.of(input_ids, attention_mask, completion_mask, position_ids)
        head = _Head.of(model)
        if transport.world_size > 1 or reproducible:
            _check_positions(head.owner, input_ids.size(1))
        chunk_tokens = _chunk_tokens(model, layout, scheme) if reproducible else None
    fields: dict[str, HeaderValue] = {
        "the shape of input_ids": str(tuple(input_ids.shape)),
        "temperature": temperature,
        "return_entropy": bool(return_entropy),
        "layout": str(layout),
        "scheme": str(scheme),
        "check": bool(check),
        "the tokens of a reproducible chunk": chunk_tokens or 0,
        "whether gradients are wanted": torch.is_grad_enabled(),
    }
    with transport.agree(_NAME, fields, input_ids.device, data=rows.checksum()):
        pass
    if check and transport.world_size > 1 and head.owner not in _checked:
        rows.longest().check(model, head, group, layout, scheme)
        _checked.add(head.owner)
    in_one = None if chunk_tokens is None else in_chunks(rows.document > 0, chunk_tokens)
    some = rows if in_one is None else rows.taken(in_one[0])
    buffers, mask = some.padded(layout, transport.world_size, chunk_tokens)
    plan = ContextParallelPlan(group, mask, layout, scheme=scheme)
    # The backward reads the shards, which stay in the copies.
    with plan.in_place(buffers, [1] * len(buffers), kept=buffers), transport.propagate_errors(_NAME):
        local = head.run(model, buffers, temperature, return_entropy, chunk_tokens)
    full = plan.unshard(local)
    if in_one is not None:
        full = in_one[1].unshared(full[:, : in_one[1].num_tokens])
    full = full[:, : input_ids.size(1) - 1]
    return full.unbind(-1) if return_entropy else full


def _chunk_tokens(model: nn.Module, layout: str, scheme: str) -> int:
    """Return the tokens of a chunk in which the bits are the same on any number of ranks. InputError, RefusedError:
    none."""
    if layout not in _LAYOUTS or scheme != "ulysses":
        raise InputError(
            f"reproducible is True, layout {shown(layout)} and scheme {shown(scheme)}, whose bits depend on the number "
            f"of ranks; expected {' or '.join(_LAYOUTS)}, and ulysses"
        )
    if (found := chunk_tokens_of(model)) is None:
        raise RefusedError(
            "reproducible is True and the layers are not streamed, so that products have as many rows as a rank has "
            "tokens; expected ringtile.stream_layers(model, stream_tokens) before"
        )
    return found


@contextlib.contextmanager
def _streaming(chunk_tokens: int | None) -> Iterator[None]:
    """Inside, streamed layers attend over the sequence of the block that is entered, on each rank in chunks."""
    sequence = entered()[-1].scope.sequence
    assert sequence is not None  # the buffers' and the mask's
    places, last = sequence.layout.positions(sequence.rank), sequence.seq_len - 1
    with active(ShardedBatch(sequence, last + 1, last, None, places, chunk_tokens=chunk_tokens)):
        yield


class _Rows(NamedTuple):
    """Whole rows, checked. Only the mask is on the CPU."""

    input_ids: Tensor  # int64 (B, S)
    position_ids: Tensor  # int64 (B or 1, S)
    labels: Tensor  # int64 (B, S): the token that each token is to predict, _IGNORE for none
    document: Tensor  # int64 CPU (B, S): 0 for padding, else the number of a document
    mask: IntervalMask

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        completion_mask: Tensor | None,
        position_ids: Tensor | None,
    ) -> _Rows:
        arguments.check_tensor("input_ids", input_ids)
        if input_ids.dtype != torch.int64 or input_ids.dim() != 2 or input_ids.numel() == 0:
            raise InputError(
                f"input_ids are {input_ids.dtype} {tuple(input_ids.shape)}; expected torch.int64 (B, S), not empty"
            )
        shape, device = input_ids.shape, input_ids.device
        if device.type == "meta":
            raise InputError("input_ids is on meta, which holds no data; expected a real device")
        for name, x in (("attention_mask", attention_mask), ("completion_mask", completion_mask)):
            if x is None:
                continue
            arguments.check_tensor(name, x)
            if x.shape != shape or x.is_floating_point() or x.is_complex():
                raise InputError(
                    f"{name} is {x.dtype} {tuple(x.shape)}; expected bool or integers {tuple(shape)}, an entry for "
                    "each token of input_ids, those of the prompt too"
                )
        if position_ids is None:
            position_ids = torch.arange(shape[1], device=device)[None]
        arguments.check_tensor("position_ids", position_ids)
        if position_ids.dtype != torch.int64 or position_ids.shape not in (shape, (1, shape[1])):
            raise InputError(
                f"position_ids are {position_ids.dtype} {tuple(position_ids.shape)}; expected torch.int64 "
                f"{tuple(shape)}, or one row"
            )
        arguments.check_devices(
            "input_ids",
            input_ids,
            attention_mask=attention_mask,
            completion_mask=completion_mask,
            position_ids=position_ids,
        )
        document = torch.ones(shape, device="cpu") if attention_mask is None else attention_mask.cpu()
        document = document.long()
        mask = IntervalMask.causal(shape[1])
        if bool((document != 1).any()):
            mask = mask & IntervalMask.from_padding(document)
        # A token is predicted by the one before it if it attends that one: if both are of one document.
        before = torch.arange(shape[1] - 1, device="cpu")
        predicted = (mask.begin[:, 1:] <= before) & (before < mask.end[:, 1:])
        wanted = predicted.to(device).expand(shape[0], -1)
        if completion_mask is not None:
            wanted = wanted & (completion_mask[:, 1:] != 0)
        labels = torch.where(wanted, input_ids[:, 1:], _IGNORE)
        return cls(input_ids, position_ids, functional.pad(labels, (0, 1), value=_IGNORE), document, mask)

    def checksum(self) -> int:
        """Return a checksum of the rows and of what is asked of them."""
        return int(checksum(self.input_ids, self.position_ids, self.labels, self.mask.begin, self.mask.end))

    def longest(self) -> _Rows:
        """Return the row with the most tokens, without its padding."""
        index = int((self.document > 0).sum(1).argmax())
        tokens = self.document[index] > 0
        if not bool(tokens.any()):  # padding alone, which attends nothing
            tokens = torch.ones_like(tokens)
        found = [x.expand_as(self.input_ids)[index : index + 1, tokens.to(x.device)] for x in self[:2]]
        document = self.document[index : index + 1, tokens]
        return _Rows.of(found[0], document.to(self.input_ids.device), None, found[1])

    def taken(self, places: Tensor) -> _Rows:
        """One row of the tokens at these places (T,) of the flattened rows; -1: padding. Rows become documents.

        Padding repeats the token before it, and attends nothing: see `padded`.
        """
        numbers = torch.arange(len(self.document), device="cpu")[:, None] * int(self.document.max() + 1) + self.document
        of_rows = torch.where(self.document > 0, numbers, 0).flatten()
        index, is_token = torch.arange(len(places), device="cpu"), places >= 0
        places = places[torch.where(is_token, index, 0).cummax(0).values].clamp(min=0)
        documents = torch.where(is_token, of_rows[places], 0)[None]
        mask = IntervalMask.causal(len(places)) & IntervalMask.from_padding(documents)
        on_device = to_device(places, self.input_ids.device)
        input_ids, position_ids, labels = (x.expand_as(self.input_ids).flatten()[on_device][None] for x in self[:3])
        labels = torch.where(to_device(is_token, labels.device), labels, _IGNORE)
        return _Rows(input_ids, position_ids, labels, documents, mask)

    def padded(
        self, layout: str, world_size: int, chunk_tokens: int | None = None
    ) -> tuple[list[Tensor], IntervalMask]:
        """Copies of input_ids, position_ids and labels, and the mask, of as many tokens as the layout needs or more;
        on each rank of whole chunks."""
        multiple, seq_len = Layout.multiple(layout, world_size), self.input_ids.size(1)
        padding = max(0, multiple - seq_len) if chunk_tokens is None else -seq_len % (multiple * chunk_tokens)
        # Padding repeats the last token of each row: zeros have norms without a gradient. It is a document of its own,
        # but where bits must not depend on it: kernels begin with the first key that any of 32 queries attends.
        last = self.document.ne(0).int().cumsum(1).argmax(1, keepdim=True).to(self.input_ids.device)
        ids = torch.cat([self.input_ids, self.input_ids.gather(1, last).expand(-1, padding)], 1)
        counted = torch.arange(padding, device=ids.device).expand(self.position_ids.size(0), -1)
        positions = torch.cat([self.position_ids, counted], 1)
        labels = functional.pad(self.labels, (0, padding), value=_IGNORE)
        return [ids.clone(), positions.clone(), labels.clone()], self.mask.padded(padding, attends=chunk_tokens is None)

    def check(self, model: nn.Module, head: _Head, group: Group, layout: str, scheme: str) -> None:
        """RefusedError: the ranks do not compute on a cut of these rows what one process computes."""
        buffers, mask = self.padded(layout, transport_of(group).world_size)
        block = FirstBlock(ContextParallelPlan(group, mask, layout, scheme=scheme), buffers, [1] * len(buffers))
        inner = inside_engine(model)
        with torch.inference_mode(False), torch.enable_grad():
            block.check(inner, lambda: head.run(inner, buffers, 1.0, False).sum(), averages=False)


class _Head(NamedTuple):
    """The output projection of a model, and the module whose forward calls it."""

    owner: nn.Module
    projection: nn.Linear

    @classmethod
    def of(cls, model: nn.Module) -> _Head:
        """RefusedError: a model without one, or with one that is no plain Linear."""
        if not isinstance(model, nn.Module):
            raise InputError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
        getters = (x for x in model.modules() if hasattr(type(x), "get_output_embeddings"))
        heads: Any = (x.get_output_embeddings() for x in getters)  # type: ignore[operator]
        head = next((x for x in heads if x is not None), None)
        path = next((path for path, x in model.named_modules() if x is head), None)
        if head is None or path is None:
            raise RefusedError(
                f"{type(model).__name__} has no output projection; expected a causal language model, whose "
                "get_output_embeddings() returns it"
            )
        names = path.split(".")
        parents = [model.get_submodule(".".join(names[:i])) for i in range(len(names))]
        if any("_orig_mod" in x._modules or x._compiled_call_impl is not None for x in (*parents, head)):
            raise RefusedError(
                f"{type(model).__name__} is compiled as a whole; expected its layers compiled, one by one: "
                "for layer in model.model.layers: layer.compile()"
            )
        owner = parents[-1]
        if other := not_plain(head):
            raise RefusedError(
                f"the output projection of {type(owner).__name__} is {other}; expected a plain torch.nn.Linear: "
                "leave it out of an adapter's target_modules, and call ringtile.restore on a Trainer"
            )
        return cls(owner, head)

    def run(
        self,
        model: nn.Module,
        buffers: list[Tensor],
        temperature: float,
        return_entropy: bool,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """Return log_probs (B, N), or with entropies (B, N, 2), of the rows of `_Rows.padded`, whole or sharded.

        The model is called as it is, so that its engine's hooks run.
        """
        input_ids, position_ids, labels = buffers

        def replace(owner: nn.Module, args: Any, output: Any) -> Any:
            logits = output if isinstance(output, TiledLogits) else getattr(output, "logits", None)
            if not isinstance(logits, TiledLogits):
                raise RefusedError(
                    f"{type(owner).__name__} returns no logits of its output projection; expected them alone, or in "
                    "`logits` of what it returns (return_dict=True in transformers)"
                )
            found = self._log_probs(logits, labels, temperature, return_entropy, chunk_tokens)
            if output is logits:
                return found
            output.logits = found
            return output

        # Before the hooks of FSDP2, which look for tensors in the output and free gathered weights.
        handle = self.owner.register_forward_hook(replace, prepend=True)
        self.projection.forward = MethodType(_projected, self.projection)  # type: ignore[method-assign]
        is_streamed = chunk_tokens_of(model) is not None
        masks = {"attention_mask": empty_mask(input_ids.size(0), input_ids.device)} if is_streamed else {}
        try:
            with _streaming(chunk_tokens) if is_streamed else contextlib.nullcontext():
                output = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **masks)
        finally:
            del self.projection.forward
            handle.remove()
        result: Tensor = output if isinstance(output, Tensor) else output.logits
        if result.dtype != state_dtype(result.dtype):
            raise RefusedError(
                f"the engine has rounded log-probabilities to {result.dtype}; expected the dtype that the model "
                "returns: leave output_dtype out of FSDP2's MixedPrecisionPolicy"
            )
        return result

    def _log_probs(
        self,
        logits: TiledLogits,
        labels: Tensor,
        temperature: float,
        return_entropy: bool,
        chunk_tokens: int | None,
    ) -> Tensor:
        head = self.projection
        if isinstance(head, FSDPModule):
            head.unshard()  # freed after its forward, if it is in a group of its own; the backward frees it again

        def computed(weight: Tensor, bias: Tensor | None) -> Tensor:
            found = tiled_log_probs(
                *(logits.hidden, weight, labels, bias),
                temperature=temperature,
                logit_scale=float(logits.scale),
                softcap=float(logits.softcap or 0),
                return_entropy=return_entropy,
                chunk_tokens=chunk_tokens,
            )
            return torch.stack(found, dim=-1) if return_entropy else found

        if not hasattr(head.weight, "ds_id"):
            return computed(head.weight, head.bias)
        gathered: Tensor = head(logits.hidden, computed=computed)  # by ZeRO-3's hooks
        return gathered


def _projected(
    head: nn.Linear, hidden: Tensor, computed: Callable[[Tensor, Tensor | None], Tensor] | None = None
) -> Tensor | TiledLogits:
    """The forward of an output projection: logits that do not exist; for `_log_probs`, what it computes."""
    return TiledLogits(head, hidden) if computed is None else computed(head.weight, head.bias)


_USE = "expected one rank a row, or a Trainer under ringtile.enable, which serves it"


def _check_positions(owner: nn.Module, seq_len: int) -> None:
    """RefusedError: what depends on a token's place, or the row's length, where a shard or a cut of the row differs."""
    name = type(owner).__name__
    if "position_ids" not in inspect.signature(type(owner).forward).parameters:
        raise RefusedError(
            f"{name} takes no position_ids, and would count from 0 on every rank; expected a model that does"
        )
    config: Any = getattr(owner, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in kinds and isinstance(window, int) and window < seq_len:
        raise RefusedError(f"{name} has a sliding window of {window} tokens, shorter than the row; {_USE}")
    if "chunked_attention" in kinds:
        raise RefusedError(f"{name} has layers of chunked attention; {_USE}")
    for module in owner.modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager":
            raise RefusedError(
                f"{name} has eager attention, which hides from the ring; expected attn_implementation='sdpa'"
            )
        if depends_on_length(module):  # by the largest position, which a shard does not know
            raise RefusedError(
                f"{name} has a rotary embedding whose frequencies depend on the length of the row; {_USE}"
            )
        if getattr(module, "attn_temperature_tuning", False):
            raise RefusedError(f"{name} multiplies queries by a temperature that depends on their place; {_USE}")
