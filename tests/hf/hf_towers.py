"""Vision towers, split over ranks and in one process, for the tests of both."""

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from ringtile.hf.features import towers
from ringtile.hf.patches import Patches
from ringtile.transport.loopback import LoopbackWorld
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tools.models import tiny_images

GRID = torch.tensor([[1, 4, 4], [1, 2, 6], [1, 8, 4], [1, 2, 2], [1, 6, 6]])  # patches: 16, 12, 32, 4, 36
PATCH = 2 * 3 * 8 * 8


def pixels(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def packed(grid: Tensor = GRID) -> dict[str, Any]:
    return {"pixel_values": pixels(int(grid.prod(1).sum()), PATCH), "image_grid_thw": grid}


def tiles(num_images: int = 5) -> dict[str, Any]:
    return {"pixel_values": pixels(num_images, 3, 32, 32)}


def masked_tiles() -> dict[str, Any]:
    mask = torch.ones(1, 5, 32, 32, dtype=torch.bool)
    mask[0, 1, :, 16:] = mask[0, 3, 8:] = False
    return {"pixel_values": pixels(1, 5, 3, 32, 32), "pixel_attention_mask": mask}


def sized() -> dict[str, Any]:
    sizes = torch.tensor([[32, 32], [16, 32], [32, 16], [16, 16], [32, 32]])
    return {"pixel_values": pixels(5, 3, 32, 32), "image_sizes": sizes}


# By model type: the attribute that holds the tower, the call, and whether all of it computes in its own dtype.
TOWERS: dict[str, tuple[str, Callable[[], dict[str, Any]], bool]] = {
    "qwen2_5_vl": ("visual", packed, False),
    "qwen3_vl": ("visual", packed, True),
    "qwen3_5": ("visual", packed, True),
    "glm4v": ("visual", packed, False),
    "gemma3": ("vision_tower", tiles, False),
    "llava": ("vision_tower", tiles, False),
    "internvl": ("vision_tower", tiles, True),
    "idefics3": ("vision_model", masked_tiles, True),
    "smolvlm": ("vision_model", masked_tiles, True),
    "mistral3": ("vision_tower", sized, False),
}


def tower_model(model_type: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model in training, whose parameters are all other than 0 and 1."""
    model = tiny_images.image_model(model_type).to(dtype)
    model.set_attn_implementation("eager")
    return model


def features_of(output: Any) -> Tensor:
    """All that the language model is given, in one vector."""

    def tensors(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value.flatten()
        else:  # a tuple by image, in later releases inside a list by layer; None
            for part in value or ():
                yield from tensors(part)

    return torch.cat([*tensors(output.pooler_output), *tensors(getattr(output, "deepstack_features", None))])


class Flops(TorchDispatchMode):
    """Counts as torch's FlopCounterMode, but in the threads of several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


class TowerCase:
    """A model, a call of what holds its tower, and a loss of which each rank has a part."""

    def __init__(
        self,
        model: nn.Module,
        tower: Callable[[nn.Module], nn.Module],
        call: Callable[[nn.Module], Tensor],
        context: Callable[[], Any] = torch.enable_grad,
    ) -> None:
        self.model, self.tower, self.call, self.context = model, tower, call, context
        with context(), Flops() as counting:
            self.features = call(model)
        generator = torch.Generator().manual_seed(3)
        self.weights = torch.randn(self.features.shape, dtype=self.features.dtype, generator=generator)
        self.readers = torch.randint(0, 12, self.features.shape, generator=generator)  # whose tokens read a feature
        with counting:
            self.gradients = self.of(model, self.features, [*range(12)])
        self.flops = counting.flops
        self.features = self.features.detach()

    def of(self, model: nn.Module, features: Tensor, readers: list[int]) -> dict[str, Tensor]:
        """The gradients of the loss of some readers."""
        model.zero_grad()
        if features.requires_grad:
            weights = torch.where(torch.isin(self.readers, torch.tensor(readers)), self.weights, 0.0)
            (features * weights).sum().backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    def on_ranks(self, world_size: int) -> list[SimpleNamespace]:
        """By rank: features, gradients, bytes and flops of the second call."""
        models = [copy.deepcopy(self.model) for _ in range(world_size)]

        def run(group):
            rank, patches = group.transport.rank, Patches()
            model = models[rank]
            original = self.tower(model).forward
            towers.split(self.tower(model), "tower", group, patches)
            with self.context():
                self.call(model)
            sent = group.transport.bytes_sent
            with self.context(), Flops() as counting:
                features = self.call(model)
            forward_bytes = group.transport.bytes_sent - sent
            with counting:
                gradients = self.of(model, features, [*range(rank, 12, world_size)])
            patches.restore()
            assert self.tower(model).forward == original
            return SimpleNamespace(
                features=features.detach(),
                gradients=gradients,
                forward_bytes=forward_bytes,
                bytes=group.transport.bytes_sent - sent,
                flops=counting.flops,
            )

        return LoopbackWorld(world_size).run(run)

    def check(self, world_size: int, tolerance: float) -> list[SimpleNamespace]:
        ranks = self.on_ranks(world_size)
        for rank in ranks:
            assert (rank.features - self.features).abs().max() <= tolerance * self.features.abs().max()
            assert rank.gradients.keys() == self.gradients.keys()
        largest = max((x.abs().max() for x in self.gradients.values()), default=0.0)
        for name, expected in self.gradients.items():
            error = (sum(rank.gradients[name] for rank in ranks) - expected).abs().max()
            assert error <= tolerance * largest, name
        return ranks


def tower_case(model_type: str, dtype: torch.dtype = torch.float64, change: Any = None, **options: Any) -> TowerCase:
    attribute, make, _ = TOWERS[model_type]
    arguments = make() | options.pop("arguments", {})
    arguments["pixel_values"] = arguments["pixel_values"].to(dtype)
    model = tower_model(model_type, dtype)
    model = model if change is None else change(model)
    base = lambda model: model.get_base_model() if hasattr(model, "get_base_model") else model  # noqa: E731
    return TowerCase(
        model,
        lambda model: getattr(base(model).model, attribute),
        lambda model: features_of(base(model).model.get_image_features(**arguments)),
        **options,
    )
