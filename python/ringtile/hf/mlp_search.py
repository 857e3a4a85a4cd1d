"""Finds the MLPs of a model by structure; no class is known by name."""

from __future__ import annotations

import inspect
import itertools

from torch import nn

Maps = set[tuple[int, int]]  # {(input width, output width)} of a linear map; both orders if the module does not say


def find_mlps(model: nn.Module) -> dict[str, nn.Module]:
    """The MLPs of a model's layers, by name: gated or not, fused or not; a mixture of experts counts as one MLP.

    A layer is an element of an nn.ModuleList. Its MLPs are the outermost submodules, or the layer itself, that

    - take one tensor and nothing else: forward(self, x), keyword-only arguments aside;
    - hold a linear map from some width E to F or 2 F (gate and up fused), and another from F back to E;
    - do not mix tokens: nothing inside counts heads (attention, linear attention, state spaces) or convolves.

    An MLP that several layers share is found once. A module beside attention that breaks these rules is skipped with
    everything inside it: a mixture of experts that takes more than hidden states yields nothing.
    """
    found: dict[str, nn.Module] = {}
    _search(model, "", False, found)
    return found


def _search(parent: nn.Module, prefix: str, in_layer: bool, found: dict[str, nn.Module]) -> None:
    for name, child in parent.named_children():
        is_layer = isinstance(parent, nn.ModuleList)
        if child in found.values() or _has_two_widths(child) or (in_layer and not is_layer and _mixes_tokens(child)):
            continue
        mixes_inside = any(_mixes_tokens(module) for module in child.modules())
        if (in_layer or is_layer) and not mixes_inside and _takes_one_tensor(child) and _returns_to_its_width(child):
            found[prefix + name] = child
        elif is_layer or mixes_inside or not in_layer or isinstance(child, nn.ModuleList):
            _search(child, f"{prefix}{name}.", in_layer or is_layer, found)


def _mixes_tokens(module: nn.Module) -> bool:
    counts_heads = any("head" in name and isinstance(value, int) for name, value in vars(module).items())
    return counts_heads or isinstance(module, nn.modules.conv._ConvNd)


def _takes_one_tensor(module: nn.Module) -> bool:
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    kinds = [argument.kind for argument in arguments]
    extra = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return kinds[:1] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] and all(kind in extra for kind in kinds[1:])


def _has_two_widths(module: nn.Module) -> bool:
    """Whether the module is a single linear layer: torch's, a quantized one, an adapter's or transformers' Conv1D."""
    return bool(_stated_widths(module))


def _stated_widths(module: nn.Module) -> Maps:
    for names in (("in_features", "out_features"), ("nx", "nf")):
        width_in, width_out = (getattr(module, name, None) for name in names)
        if isinstance(width_in, int) and isinstance(width_out, int):
            return {(width_in, width_out)}
    return set()


def _returns_to_its_width(module: nn.Module) -> bool:
    """Whether the module holds a linear map from some E to F or 2 F, and another from F back to E."""
    maps: list[Maps] = []
    for part in module.modules():
        if stated := _stated_widths(part):
            maps.append(stated)
            continue
        for parameter in part.parameters(recurse=False):  # fused experts: (num_experts, both widths in either order)
            shape = getattr(parameter, "ds_shape", parameter.shape)  # the full shape under ZeRO-3
            if len(shape) in (2, 3):
                maps.append({(shape[-2], shape[-1]), (shape[-1], shape[-2])})
    return any(
        into[0] == back[1] and into[1] in (back[0], 2 * back[0])
        for first, second in itertools.permutations(maps, 2)
        for into, back in itertools.product(first, second)
    )
