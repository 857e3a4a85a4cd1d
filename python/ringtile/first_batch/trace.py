"""What the modules of a model compute in one forward and backward pass, kept as a few numbers per token.

Of each tensor (B, N, F) that a module takes or returns, and of the gradient that reaches what it returns, a `Trace`
keeps a sketch: NUM_SIGNS sums over F with random signs. The root mean square of such sums of a difference estimates its
norm (Achlioptas, 2003, doi:10.1016/S0022-0000(03)00025-4), so traces of two runs are compared, and the tokens of all
ranks joined, without the tensors.

Shape letters: B batch, N tokens inside the model (of a shard, or all), F features.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ringtile.precision import float32_rounding
from ringtile.sequence.sharded import ShardedSequence

# A sharded run rounds where the run with rounding does, by a few units in the last place instead of at most one, and
# both differences are the largest of many.
TIMES = 16.0
NUM_SIGNS = 4
_COLUMNS = 1 << 14  # features that are sketched at once: those of logits would fill memory as float64
_MISSING = -1.25e300  # a number that no sketch is
_EXPERTS = ".experts."  # in the path of a module that is given some tokens only


class Event(NamedTuple):
    """A module takes or returns a tensor."""

    path: str
    number: int  # how often the module was entered before
    kind: str  # "input" or "output"


@dataclass(eq=False)
class ModelCall:
    """One call of a model: the tokens inside it."""

    shape: tuple[int, int]  # (B, N)
    sequence: ShardedSequence | None  # None: not sharded
    seq_len: int  # tokens of the whole sequence, without the layout's padding
    counted: Tensor | None = None  # bool (B, N): tokens that are no padding; None: all
    rows: Tensor | None = None  # int64 (B, S): which token each of a row is in the tree inside; padding: seq_len
    values: dict[Event, Tensor] = field(default_factory=dict)  # float64 (B, N, NUM_SIGNS)
    widths: dict[Event, int] = field(default_factory=dict)  # F
    units: dict[Event, float] = field(default_factory=dict)  # in the last place of 1, in the dtype of the tensor
    gradients: dict[Event, Tensor] = field(default_factory=dict)

    def in_shared_order(self) -> list[Event]:
        """The events, by path and by what was computed: the same list of tensors on every rank that computed them all.

        Ranks may call one module in different orders: a loop over a set follows the hash seed of the process.
        """
        counts = Counter((event.path, event.kind) for event in self.values)

        def content(event: Event) -> list[float]:
            if counts[event.path, event.kind] == 1:
                return []
            both = (event._replace(kind=kind) for kind in ("output", "input"))
            return [float(self.values[x].abs().sum()) if x in self.values else -1.0 for x in both]

        return sorted(self.values, key=lambda event: (event.path, event.kind, content(event), event.number))

    def joined(self, sketches: Mapping[Event, Tensor], of: Mapping[Event, Tensor]) -> dict[Event, Tensor]:
        """Those of the events `of`, each of all ranks' tokens; without what a rank lacks.

        of: events of this rank, in an order in which all ranks have the same ones. Of a tree, (B, S, NUM_SIGNS) of its
        rows. A collective where the call is sharded.
        """
        if self.sequence is None or not of:
            return {event: sketches[event] for event in of if event in sketches}
        device = next(iter(of.values())).device
        missing = torch.full((*self.shape, NUM_SIGNS), _MISSING, dtype=torch.float64, device=device)
        local = torch.stack([sketches.get(event, missing) for event in of], dim=2)  # (B, N, events, NUM_SIGNS)
        whole = self.sequence.unshard(local, dim=1)[:, : self.seq_len]
        if self.rows is not None:
            whole = torch.cat([whole[0], torch.zeros_like(whole[0, :1])])[self.rows.to(device)]
        return {event: part for event, part in zip(of, whole.unbind(2), strict=True) if not (part == _MISSING).any()}

    def local(self, whole: Tensor) -> Tensor:
        """Of numbers (B S, ...) of all tokens, as a run of one process has them: those of the tokens inside."""
        if self.sequence is None:
            return whole
        layout, rank = self.sequence.layout, self.sequence.rank
        places = layout.positions(rank).to(whole.device).clamp(max=self.seq_len - 1)
        if self.rows is None:
            return whole.view(self.shape[0], -1, *whole.shape[1:])[:, places].flatten(0, 1)
        batch, seq_len = self.rows.shape  # a token of the rows, of which one process may have padded each, that each is
        width = whole.size(0) // batch
        tokens = torch.arange(batch, device=places.device)[:, None] * width + torch.arange(seq_len).to(places)
        found = places.new_zeros(self.seq_len + 1)
        found[self.rows.to(places)] = tokens
        return whole[found[places]]

    def summed(self, gradients: Mapping[Event, Tensor]) -> Mapping[Event, Tensor]:
        """Gradients (B, S, NUM_SIGNS) of rows: where the call is of a tree, the sum of those of one token of it."""
        if self.rows is None:
            return gradients
        found = {}
        for event, gradient in gradients.items():
            rows = self.rows.to(gradient.device)
            of_tree = gradient.new_zeros(self.seq_len + 1, NUM_SIGNS)
            found[event] = of_tree.index_put_((rows,), gradient, accumulate=True)[rows]
        return found


class Trace(TorchFunctionMode):
    """One computation of a loss, with what the modules of `paths` gave and got while it was entered. A call of a model
    begins with `begin`.

    whole: whether nothing is sharded in it. rounding: disturbs what each innermost module takes and returns, and its
    gradient, by one unit in the last place, as other orders of summation do. follows: a trace of the same tokens, whose
    choices `torch.topk` makes here too where they are as good up to rounding: an expert that another order of summation
    exchanges is no error. With rounding, all are, and it is measured how far the scores are apart.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        *,
        whole: bool = True,
        rounding: bool = False,
        follows: Trace | None = None,
    ) -> None:
        super().__init__()
        self.whole = whole
        self.loss: Tensor | None = None  # ()
        self.written: Mapping[str, Tensor] = {}  # float64: by how much it changed tensors of the model, by name
        self.calls: list[ModelCall] = []
        self.sources: list[Tensor] = []  # the first tensors of the graph, to which gradients lead
        self.names = {path: type(module).__name__ for module, path in paths.items()}
        # Whether all that a module returns, and all gradients of that, those of experts too, are finite: bool ().
        self.finite: dict[tuple[str, str], Tensor] = {}
        self._paths, self._rounding, self._follows = paths, rounding, follows
        self._inside: list[Event] = []  # the modules that run, outermost first
        self._numbers: Counter[Any] = Counter()
        self._handles: list[Any] = []
        self._generator: dict[torch.device, torch.Generator] = {}
        self._waiting: ModelCall | None = None  # for its language model
        self._choices: dict[Any, tuple[Tensor, Tensor]] = {}  # scores and indices, both (B N, ...)
        self._noise: dict[Any, float] = {}  # of scores

    def begin(self, call: ModelCall, at_seam: bool = False) -> None:
        """What enters the model from here on are the tokens of this call.

        at_seam: what enters its language model. Before it, nothing is kept, but rounding is alike: what runs has no
        vector for each token.
        """
        self._waiting = call if at_seam else None
        if at_seam:
            return
        self.calls.append(call)
        self._numbers.clear()

    def entered(self, path: str, x: Tensor) -> Tensor:
        """x, which enters a language model: if a call waits for it, one of the tensors at which the graph begins."""
        if self._waiting is None:
            return x
        self.begin(self._waiting)
        self._keep(Event(path, 0, "input"), x)
        if torch.is_grad_enabled():
            x = x.detach().requires_grad_()
            self.sources.append(x)
        return x

    def __enter__(self) -> Trace:
        global _running
        _running = self
        # Hooks of all modules of the process: with hooks of its own, a module could not be tiled.
        self._handles = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _running
        _running = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        while self._handles:
            self._handles.pop().remove()

    def differs_from(self, other: Trace) -> str:
        """The first module whose numbers are not the same bits in another trace, in words; "" without one."""
        for call, again in zip(self.calls, other.calls, strict=False):
            for event, value in call.values.items():
                if not torch.equal(value.nan_to_num(), again.values.get(event, value).nan_to_num()):
                    return f"{event.path} ({self.names[event.path]})".removeprefix(" ")
        return ""

    @property
    def place(self) -> str:
        """The innermost module that runs, in words; "" outside of all."""
        if not self._inside:
            return ""
        path = self._inside[-1].path
        return f"{path} ({self.names[path]})" if path else self.names[path]

    @property
    def unit(self) -> float:
        """The largest unit in the last place of what was recorded."""
        return max((unit for call in self.calls for unit in call.units.values()), default=0.0)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that were recorded; without any, the loss, else the weights."""
        found = (value for call in self.calls for value in call.values.values())
        weights = (weight for module in self._paths for weight in module.parameters(recurse=False))
        tensors = itertools.chain(found, (self.loss,) if self.loss is not None else (), weights)
        return next((x.device for x in tensors), torch.device("cpu"))

    # ---- hooks ----------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> Any:
        path = self._paths.get(module)
        if self._waiting is not None:
            return None
        if path is None or not self.calls or _is_recomputing():
            return None
        event = Event(path, self._numbers[path], "input")
        self._numbers[path] += 1
        self._inside.append(event)
        if not args or not isinstance(args[0], Tensor) or self._tokens(args[0]) is None:
            return None
        x = self._disturbed(args[0]) if self._disturbs(module, args[0]) else args[0]
        self._keep(event, x)
        return None if x is args[0] else (x, *args[1:])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._waiting is not None:
            rounds = module in self._paths and isinstance(output, Tensor) and self._disturbs(module, output)
            return self._disturbed(output) if rounds else None
        if not self._inside or self._inside[-1].path != self._paths.get(module) or _is_recomputing():
            return None
        event = self._inside.pop()._replace(kind="output")
        found = output[0] if isinstance(output, (tuple, list)) and output else output
        if not isinstance(found, Tensor) or self._tokens(found) is None:
            if isinstance(found, Tensor) and found.requires_grad:
                found.register_hook(functools.partial(self._note, event._replace(kind="gradient")))  # type: ignore[no-untyped-call]
            return None
        self._note(event, found)
        x = found
        if x is output:
            x = self._as_source(module, args, x)
            if self._disturbs(module, x):
                x = self._disturbed(x)
        call = self.calls[-1]
        self._keep(event, x)
        if x.requires_grad and event in call.values:
            hook = functools.partial(self._on_gradient, call, event, self._disturbs(module, x))
            x.register_hook(hook)  # type: ignore[no-untyped-call]
        return None if x is output or found is not output else x

    def _on_gradient(self, call: ModelCall, event: Event, disturbs: bool, gradient: Tensor) -> Tensor | None:
        self._note(event._replace(kind="gradient"), gradient)
        disturbed = self._disturbed(gradient) if disturbs else gradient
        tokens = _as_tokens(disturbed, call.shape)
        if tokens is not None and disturbed.numel() == tokens.numel():  # else it is a sum over rows
            call.gradients[event] = _sketch(tokens)
        return disturbed if disturbs else None

    # ---- one tensor -----------------------------------------------------------------------------

    def _note(self, event: Event, x: Any) -> None:
        """Notes whether x is finite, on padding too: the gradient of a weight is made of what its module gets."""
        if self._rounding or type(x) is not Tensor or not x.is_floating_point() or x.layout != torch.strided:
            return
        place, finite = (event.path, event.kind), x.detach().isfinite().all()
        self.finite[place] = finite & self.finite.get(place, finite)

    def _tokens(self, x: Tensor) -> Tensor | None:
        return _as_tokens(x, self.calls[-1].shape)

    def _keep(self, event: Event, x: Tensor) -> None:
        tokens, call = self._tokens(x), self.calls[-1]
        if tokens is not None and _EXPERTS not in f"{event.path}.":
            call.values[event], call.widths[event], call.units[event] = _sketch(tokens), tokens.size(2), _epsilon(x)

    def _as_source(self, module: nn.Module, args: tuple[Any, ...], x: Tensor) -> Tensor:
        """x; remembered, and made to require a gradient, if the graph begins here."""
        if not torch.is_grad_enabled():
            return x
        if not x.requires_grad:
            if self.sources and not isinstance(module, nn.Embedding):
                return x
            x = x.detach().requires_grad_()
        elif any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return x
        self.sources.append(x)
        return x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or not self._inside or not args or "out" in kwargs:
            return result
        scores, place, (rows, tokens) = args[0], self._inside[-1], self.calls[-1].shape
        leading = scores.dim() > 2 and scores.shape[:2] == (rows, tokens)
        dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
        if dim not in (-1, scores.dim() - 1) or scores.dim() < 2 or not (leading or scores.size(0) == rows * tokens):
            return result
        key = len(self.calls), place, self._numbers[place]
        self._numbers[place] += 1
        flat, indices = (x.detach().flatten(0, 1) if leading else x.detach() for x in (scores, result[1]))
        self._choices[key] = flat, indices
        if self._follows is None or key not in self._follows._choices:
            return result
        theirs, chosen = (self.calls[-1].local(x) for x in self._follows._choices[key])
        if theirs.shape != flat.shape or chosen.shape != indices.shape:
            return result
        if self._rounding:
            self._follows._noise[key] = float((flat - theirs).abs().amax())
        else:
            own, others = (flat.gather(-1, x).amin(-1, keepdim=True) for x in (indices, chosen))
            chosen = torch.where(own - others <= TIMES * self._follows._noise.get(key, 0.0), chosen, indices)
        chosen = chosen.view(result[1].shape)
        return type(result)((scores.gather(-1, chosen), chosen))

    def _disturbs(self, module: nn.Module, x: Tensor) -> bool:
        return self._rounding and x.is_floating_point() and next(module.children(), None) is None

    def _disturbed(self, x: Tensor) -> Tensor:
        """x with each number one unit in the last place smaller, the same, or larger."""
        if x.device not in self._generator:
            self._generator[x.device] = torch.Generator(x.device).manual_seed(0)
        units = torch.randint(-1, 2, x.shape, generator=self._generator[x.device], device=x.device, dtype=torch.int8)
        return x + x.detach() * (units * _epsilon(x)).to(x.dtype)


_running: Trace | None = None


def running_trace() -> Trace | None:
    """That of the proof which runs; None: what runs is a step."""
    return _running


def runs_whole() -> bool:
    """Whether what runs is a proof's run in which nothing is sharded."""
    return _running is not None and _running.whole


def _is_recomputing() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _as_tokens(x: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """x as (B, N, F); None if it holds no vector for each token."""
    rows, tokens = shape
    if type(x) not in (Tensor, nn.Parameter) or not x.is_floating_point() or x.dim() < 2 or x.layout != torch.strided:
        return None
    if x.shape[:2] == (rows, tokens):
        return x.detach().reshape(rows, tokens, -1)
    if x.dim() > 2 and x.shape[:2] == (1, tokens):
        return x.detach().reshape(1, tokens, -1).expand(rows, -1, -1)
    if x.size(0) == rows * tokens:
        return x.detach().reshape(rows, tokens, -1)
    return None


def _sketch(x: Tensor) -> Tensor:
    """(B, N, F) -> float64 (B, N, NUM_SIGNS)."""
    total = torch.zeros(*x.shape[:2], NUM_SIGNS, dtype=torch.float64, device=x.device)
    for begin in range(0, x.size(2), _COLUMNS):
        part = x[..., begin : begin + _COLUMNS].double()
        total += part @ _signs(begin, part.size(2), x.device)
    return total


@functools.lru_cache(maxsize=64)
def _signs(begin: int, count: int, device: torch.device) -> Tensor:
    """float64 (count, NUM_SIGNS) of 1 and -1, the same for the same features."""
    generator = torch.Generator().manual_seed(begin)
    return (2.0 * torch.randint(0, 2, (count, NUM_SIGNS), generator=generator) - 1.0).double().to(device)


def _epsilon(x: Tensor) -> float:
    """The unit in the last place of 1 in x, or in what made it, which may be coarser: matrix products of float32, and
    the norms of a model in float64, which transformers computes in float32."""
    made_of = {torch.float32: float32_rounding(x.device), torch.float64: torch.finfo(torch.float32).eps}
    return max(torch.finfo(x.dtype).eps, made_of.get(x.dtype, 0.0))
