"""Recurrences and their convolution from their definitions, token by token in float64: an oracle; and layers of each.

Each is a function of torch operations, so that autograd gives its gradients. Of padding nothing is read. Shape letters
as in python/ringtile/recurrent/kernels.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ringtile
import torch
from ringtile import ShardedSequence
from torch import Tensor

Tensors = dict[str, Tensor]


def select(rows: Tensor, x: Tensor) -> Tensor:
    """x (B, ...), or (B, N, ...), where rows (B), or (B, N), say so, else 0; in float64."""
    return torch.where(rows.view(*rows.shape, *[1] * (x.dim() - rows.dim())), x.double(), 0.0)


def documents(seq_idx: Tensor, batch: int) -> tuple[Tensor, list[Tensor]]:
    """Which tokens are no padding, bool (B, N); of each, bool (B), in which rows it goes on from what was before."""
    seq_idx = seq_idx.expand(batch, -1)
    document, goes_on = torch.zeros(batch, dtype=seq_idx.dtype), []
    for number in seq_idx.unbind(1):
        goes_on.append((number < 0) | (number == document))
        document = torch.where(number < 0, document, number)
    return seq_idx >= 0, goes_on


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    seq_idx: Tensor,
    state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out (B, N, H, V) and the final state (B, H, K, V); without beta v is added as it is."""
    batch, _, num_heads, dim = v.shape
    held, goes_on = documents(seq_idx, batch)
    q, k = (x.repeat_interleave(num_heads // x.size(2), dim=2) for x in (q, k))
    q, k, v, decay = (select(held, x) for x in (q, k, v, decay))
    decay = decay if decay.dim() == 4 else decay[..., None]
    now = v.new_zeros(batch, num_heads, k.size(3), dim) if state is None else state.double()
    outs = []
    for t, rows in enumerate(goes_on):
        now = decay[:, t].exp()[..., None] * select(rows, now)
        u = v[:, t]
        if beta is not None:
            u = select(held, beta)[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", now, k[:, t]))
        now = now + k[:, t, :, :, None] * u[:, :, None]
        outs.append(float(scale) * torch.einsum("bhkv,bhk->bhv", now, q[:, t]))
    return torch.stack(outs, 1) if outs else v, now


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    seq_idx: Tensor,
    initial_state: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return recurrence(q, k, v, g, beta, seq_idx, initial_state, scale)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    held, _ = documents(seq_idx, x.size(0))
    x, dt = select(held, x), select(held, dt)
    before = None if initial_state is None else initial_state.mT
    y, final = recurrence(C, B, dt[..., None] * x, dt * A.double(), None, seq_idx, before, 1.0)
    return (y if D is None else y + D.double()[:, None] * x), final.mT


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    seq_idx: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A recurrence in which each channel is a head of one value, with decays of its own."""
    held, _ = documents(seq_idx, x.size(0))
    x, dt = select(held, x), select(held, dt)
    before = None if initial_state is None else initial_state[..., None]
    of_heads = (dt * x)[..., None], dt[..., None] * A.double()
    y, final = recurrence(C[:, :, None], B[:, :, None], *of_heads, None, seq_idx, before, 1.0)
    return (y[..., 0] if D is None else y[..., 0] + D.double() * x), final[..., 0]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor, initial_state: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    batch, _, num_channels = x.shape
    held, goes_on = documents(seq_idx, batch)
    x, weight = select(held, x), weight.double()
    window = x.new_zeros(batch, weight.size(1) - 1, num_channels) if initial_state is None else initial_state.double()
    ys = []
    for t, rows in enumerate(goes_on):
        tokens = torch.cat([select(rows, window), x[:, t, None]], dim=1)
        z = torch.einsum("bwc,cw->bc", tokens, weight) + (0.0 if bias is None else bias.double())
        window = torch.where(held[:, t, None, None], tokens[:, 1:], window)
        ys.append(select(held[:, t], torch.nn.functional.silu(z) if activation else z))
    return torch.stack(ys, 1) if ys else x, window


# ---- layers -------------------------------------------------------------------------------------

PARAMETERS = ("A", "D", "weight", "bias")  # tensors without tokens


class Layer(NamedTuple):
    """A function of ringtile's, of its kernels and of this module, and what it takes."""

    function: str
    shapes: dict[str, tuple[int, ...]]  # of a token, or of a parameter
    state: tuple[int, ...]  # its shape, in a row
    options: dict[str, Any]  # of every function
    of_ranks: dict[str, Any]  # of ringtile's alone

    def ours(self, tensors: Tensors, sequence: ShardedSequence) -> Tensor:
        out: Tensor = getattr(ringtile, self.function)(sequence=sequence, **tensors, **self.options, **self.of_ranks)
        return out

    def alone(self, module: object, tensors: Tensors, seq_idx: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the final state, by the function of this module or of ringtile.recurrent.kernels."""
        options = {"scale": self.shapes["k"][1] ** -0.5} if "k" in self.shapes else {}
        given = {"initial_state": None} | tensors | options | self.options
        found: tuple[Tensor, Tensor] = getattr(module, self.function)(**given, seq_idx=seq_idx)
        return found

    @property
    def of_out(self) -> tuple[int, ...]:
        """The shape of a token's output."""
        return self.shapes.get("v", self.shapes.get("x", ()))


KINDS = ("convolution", "delta", "kda", "ssd", "selective")


def layer(kind: str, H: int, G: int, K: int, V: int, C: int, **options: Any) -> Layer:
    """Of H heads with head dims K and V, of which G have a q and a k (a B and a C); or of C channels."""
    if kind == "convolution":
        return Layer("causal_conv1d", {"x": (C,), "weight": (C, 4), "bias": (C,)}, (3, C), {"activation": "silu"}, {})
    if kind == "selective":
        shapes = {"x": (C,), "dt": (C,), "A": (C, K), "B": (K,), "C": (K,), "D": (C,)}
        return Layer("selective_scan", shapes, (C, K), {}, {})
    if kind == "ssd":
        shapes = {"x": (H, V), "dt": (H,), "A": (H,), "B": (G, K), "C": (G, K), "D": (H,)}
        return Layer("ssd", shapes, (H, V, K), {}, {})
    shapes = {"q": (G, K), "k": (G, K), "v": (H, V), "g": (H, K) if kind == "kda" else (H,), "beta": (H,)}
    return Layer("gated_delta_rule", shapes, (H, K, V), options, {})


def problem(of: Layer, batch: int, seq_len: int, decay: float = 0.5) -> Tensors:
    """Random global tensors; keys have length 1, as layers normalize them.

    decay: how strong the largest is, as the logarithm of what it leaves.
    """
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in of.shapes.items():
        size = shape if name in PARAMETERS else (batch, seq_len, *shape)
        x = torch.randn(size, generator=generator, dtype=torch.float64)
        if name == "g":
            x = -decay * x.abs()
        elif name == "A":
            x = -decay * (1 + x.abs())
        elif name in ("dt", "beta"):
            x = x.sigmoid()
        elif name == "k":
            x = torch.nn.functional.normalize(x, dim=-1)
        tensors[name] = x
    return tensors


def seq_idx_of(*rows: tuple[set[int], set[int]], num_tokens: int) -> Tensor:
    """Of each row, where documents begin, and which tokens are padding."""
    return torch.tensor(
        [[-1 if t in padding else sum(b <= t for b in begins) for t in range(num_tokens)] for begins, padding in rows],
        dtype=torch.int32,
    ).view(len(rows), num_tokens)


def results(of: Layer, module: object, tensors: Tensors, seq_idx: Tensor) -> Tensors:
    """The output, the final state, and all gradients of a random function of both, whose slopes every dtype holds."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found, generator = of.alone(module, leaves, seq_idx), torch.Generator().manual_seed(0)
    slopes = [torch.randint(-8, 9, x.shape, generator=generator).to(x) / 8 for x in found]
    known = [(x, slope) for x, slope in zip(found, slopes, strict=True) if x.requires_grad]
    outputs, incoming = zip(*known, strict=True) if known else ((), ())  # padding has no graph
    gradients = torch.autograd.grad(outputs, [*leaves.values()], incoming, allow_unused=True, materialize_grads=True)
    return {"out": found[0].detach(), "final": found[1].detach(), **dict(zip(leaves, gradients, strict=True))}
