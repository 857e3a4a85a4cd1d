"""The work of a vision tower, split over the ranks of a context-parallel group.

Inside a step every rank calls the tower with the same images. Each rank computes some of them, and every rank gets the
features of all, in order. Deciding who computes what takes no message: `images.deal` is a function of the call.

A rank that gets no image computes the cheapest one and contributes no row of it. So every rank runs the tower's forward
and backward, in which FSDP2 and ZeRO-3 gather parameters and DDP waits for gradients; those of this rank are 0.

Let f_i be the features of image i, L = sum of L_r the loss, and L_r the part of rank r, of its own tokens. The gather's
backward gives the owner of image i the sum over r of d(L_r)/d(f_i) = dL/d(f_i), added in rank order, and nobody else
anything. So the owner's backward yields the share of image i in dL/dw for each weight w of the tower, and the sum of
these over the ranks is that of one process. It is the sum that a weight of the text model has, whose share on rank r
is dL_r/dw; so what an engine does to gradients, and a Trainer to the scale of L_r, is right for the tower too.

An image's features must not depend on the images that share its call. In the first call, of training and of evaluation,
each rank computes two of its images: together; with the one changed and with the other, where the other must keep every
bit; and each alone, which must have the features that it has in the call. The same shows that frames of a video are
images. If not, or if it is not known which images a call holds, every rank computes all of them, which is exact too,
and the log says so once. All groups of a world make the same number of forward passes then, whatever their images, and
one for each later call: under FSDP2 and ZeRO-3 each is a collective of the world.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.utils.generic import ModelOutput

from ringtile.errors import InputError, RefusedError
from ringtile.first_batch.random_states import all_random_states, set_random_states
from ringtile.hf.batch import active_batch, waiting_batch
from ringtile.hf.feature import HOOKS, Enabled, Feature
from ringtile.hf.features.images import Images, Rows, deal, layout_of, read
from ringtile.hf.model import drops_attention, towers
from ringtile.hf.patches import Patches
from ringtile.precision import float32_rounding
from ringtile.transport.groups import Group, all_gather_seq, transport_of
from ringtile.transport.transport import all_gather

logger = logging.getLogger("ringtile")

_OF_ALL_LAYERS = ("hidden_states", "attentions")  # outputs of which a model reads one or two


def _install(run: Enabled, patches: Patches) -> None:
    """Splits the towers of a model, in the forward passes of batches that are sharded behind them (seam.py)."""
    found = towers(run.base)
    for path, tower in found.items():
        split(tower, path, None if run.group is None else run.group.process_group, patches, _in_step)
    if found:
        patches.on_restore(run.base.register_forward_hook(_leave_out_features).remove)


def _leave_out_features(module: nn.Module, args: Any, output: Any) -> None:
    """Takes what towers return out of a model's outputs on shards, among which transformers 5.24 hands it on. DDP would
    wait for gradients of weights that nothing but these outputs shows, such as a tower's last norm, and an evaluation
    cannot gather them."""
    if active_batch() is None or not isinstance(output, ModelOutput):
        return
    for name in [name for name, value in output.items() if isinstance(value, Features)]:
        setattr(output, name, None)
        OrderedDict.__delitem__(output, name)


def _in_step() -> bool:
    batch = waiting_batch()
    return batch is not None and batch.sequence.world_size > 1


def split(
    tower: nn.Module, name: str, group: Group | None, patches: Patches, when: Callable[[], bool] = lambda: True
) -> None:
    """Splits the images of each call of a tower over a group. when: whether all ranks make the call that begins now.

    name: of the tower, in messages. Raises, in a call, RefusedError for dropout in training.
    """
    if transport_of(group).world_size > 1:
        patches.wrap(tower, "forward", _SplitTower(tower, name, group, when))


class _Proved(NamedTuple):
    """What a first call has shown. kind: of its arguments. rows: where outputs hold images; None: images mix."""

    kind: object
    rows: dict[str, Rows] | None
    splits_videos: bool = False


class _SplitTower:
    """What stands in for the forward of one tower."""

    def __init__(self, tower: Any, name: str, group: Group | None, when: Callable[[], bool]) -> None:
        self._tower, self._name, self._group, self._when = tower, name, group, when
        self._transport = transport_of(group)
        self._proved: dict[bool, _Proved] = {}  # by whether the tower trains
        self._said: set[str] = set()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._when():
            return original(*args, **kwargs)
        with self._transport.propagate_errors(self._name):
            found = self._images(original, args, kwargs)
            if found is None:
                return original(*args, **kwargs)
            images, rows = found
            owned = deal(images.costs, self._transport.world_size)
            own = owned[self._transport.rank]
            ran = own or [_cheapest(images)[0]]
            local = original(**images.take(ran))
        return _whole(local, _Gather(self._name, self._group, images, rows, owned, own, ran))

    def _images(
        self, original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Images, dict[str, Rows]] | None:
        """The images of a call, and where its outputs hold them; None: every rank computes all."""
        arguments = _by_name(original, args, kwargs)
        images = "an argument has no name" if arguments is None else read(arguments, self._tower.config)
        proved = self._proved.get(self._tower.training)
        if isinstance(images, str):
            self._say(images)
            if proved is None:  # nor is a later call proved, of one group alone
                self._proved[self._tower.training] = _Proved(None, None)
            return None
        if proved is None:
            proved = self._proved[self._tower.training] = self._prove(original, images)
        if proved.rows is None or len(images.patches) < 2:
            return None
        if proved.kind != _kind(images.arguments):
            self._say("its first call had other arguments")
            return None
        if images.are_frames and not proved.splits_videos:
            self._say("the features of a frame depend on other frames")
            return None
        return images, proved.rows

    def _say(self, reason: str) -> None:
        kind = re.sub(r"\d+", "", reason)  # of calls with other numbers of images
        if kind not in self._said and self._transport.rank == 0:
            logger.warning("ringtile: every rank computes all images of %s: %s", self._name, reason)
        self._said.add(kind)

    # ---- the first call -------------------------------------------------------------------------

    def _prove(self, original: Callable[..., Any], images: Images) -> _Proved:
        """A collective."""
        tower, kind = self._tower, _kind(images.arguments)
        if tower.training:
            self._refuse_dropout()
            if any(isinstance(module, _BatchNorm) and module.training for module in tower.modules()):
                self._say("it has a batch norm, which mixes them")
                return _Proved(kind, None)
        two = _cheapest(images)
        states = all_random_states()
        with torch.no_grad():
            rows, apart = self._compare(original, images, two)
            frames: list[float] = []
            if images.grid is not None:
                try:
                    _, frames = self._compare(original, images, [two[0]] * 2, as_video=True)
                except (IndexError, RuntimeError, ValueError):  # a tower that is given frames as images (GLM-4V)
                    frames = [1.0, 0.0]
        set_random_states(states)
        device = next((x.device for _, x in rows.values()), torch.device("cpu"))
        changed, moved, *of_frames = self._largest([*apart, *frames], device)
        strange = [f"{path} {tuple(x.shape)}" for path, (place, x) in rows.items() if place is None]
        if strange or not rows:
            self._say(f"it is not known which rows of its {(*strange, 'output')[0]} are of which of two images")
        elif changed > 0:
            self._say("the features of an image change with the other images of the call")
        elif moved > 1:
            self._say("the features of an image depend on whether it is alone")
        known = {path: place for path, (place, _) in rows.items() if place is not None}
        splits = len(known) == len(rows) > 0 and changed == 0 and moved <= 1
        splits_videos = bool(of_frames) and of_frames[0] == 0 and of_frames[1] <= 1
        return _Proved(kind, known if splits else None, splits_videos)

    def _compare(
        self, original: Callable[..., Any], images: Images, two: Sequence[int], as_video: bool = False
    ) -> tuple[dict[str, tuple[Rows | None, Tensor]], list[float]]:
        """Two images together: where outputs hold them; 1 if one of them changes the features of the other, and how
        much their features differ when alone, over what rounding explains."""
        pair = read(images.take(two), self._tower.config)
        assert isinstance(pair, Images)
        pair = pair.with_changed([1]) if as_video else pair

        def run(some: Images) -> dict[str, Tensor]:
            return dict(_tensors(original(**(some.as_video() if as_video else some.arguments))))

        whole = run(pair)
        rows = {path: (pair.rows(x), x) for path, x in whole.items()}
        changes, difference = 0.0, 0.0
        for image in (0, 1):
            changed = run(pair.with_changed([1 - image]))
            alone = dict(_tensors(original(**pair.take([image]))))
            for path, (place, x) in rows.items():
                if place is None or path not in alone or path not in changed or changed[path].shape != x.shape:
                    changes = 1.0
                    continue
                mine = pair.select(x, place, [image])
                changes = max(changes, float(not _equal(mine, pair.select(changed[path], place, [image]))))
                difference = max(difference, _difference(mine, alone[path], self._rounding(x)))
        return rows, [changes, difference]

    def _refuse_dropout(self) -> None:
        modules = self._tower.named_modules()
        drops = [(path, x.p) for path, x in modules if isinstance(x, nn.modules.dropout._DropoutNd) and x.training]
        found = [f"{self._name}.{path} drops with p = {p}" for path, p in drops if p > 0]
        for what in [*found, *[f"the attention of {self._name} drops weights"] * drops_attention(self._tower)]:
            raise RefusedError(
                f"{what}; expected no dropout in a tower, of which each rank computes other images: set its rate to 0 "
                f"in the model's config, or lora_dropout=0.0"
            )

    def _rounding(self, x: Tensor) -> float:
        """How much of an output rounding may change: the lower half of its digits."""
        dtypes = {x.dtype, *(weight.dtype for weight in self._tower.parameters())}
        if torch.is_autocast_enabled(x.device.type):
            dtypes.add(torch.get_autocast_dtype(x.device.type))
        units = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
        units.append(2.0 * float32_rounding(x.device))
        return math.sqrt(max(units, default=0.0))

    def _largest(self, numbers: Sequence[float], device: torch.device) -> list[float]:
        """The largest of each number over the ranks: the same everywhere."""
        with self._transport.agree("first call of a tower", {"tower": self._name, "numbers": len(numbers)}, device):
            mine = torch.tensor(numbers, dtype=torch.float32, device=device)
            largest: list[float] = all_gather(mine, self._transport, "the differences").amax(0).tolist()
        return largest


def _by_name(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name; None: some have none."""
    parameters = inspect.signature(forward).parameters.values()
    names = [each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD]
    return None if len(args) > len(names) else {**dict(zip(names, args, strict=False)), **kwargs}


def _cheapest(images: Images) -> list[int]:
    """Two of the images, or the only one twice."""
    cheapest = sorted(range(len(images.costs)), key=lambda image: (images.costs[image], image))
    return [cheapest[0], cheapest[min(1, len(cheapest) - 1)]]


def _kind(arguments: Mapping[str, Any]) -> object:
    """What calls of one kind have alike. Strings are left out: LLaVA-OneVision hands one on with images, not videos."""

    def of(value: Any) -> object:
        if isinstance(value, Tensor):
            return value.dtype, value.dim()
        return value if isinstance(value, bool) else type(value)

    known = {name: x for name, x in arguments.items() if x is not None and not isinstance(x, str)}
    return {name: of(value) for name, value in known.items() if name != "return_dict"}


def _tensors(output: Any, path: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The tensors in what a tower returns, with their places."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield from _tensors(value, f"{path}.{name}")
    elif isinstance(output, list | tuple):
        for index, value in enumerate(output):
            yield from _tensors(value, f"{path}.{index}")


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(x.nan_to_num() if x.is_floating_point() else x for x in (one, other)))


def _difference(expected: Tensor, got: Tensor, rounding: float) -> float:
    """The largest difference over what rounding may make."""
    if expected.shape != got.shape:
        return float("inf")
    if not expected.is_floating_point() or expected.numel() == 0:
        return 0.0 if torch.equal(expected, got) else float("inf")
    expected, got = expected.nan_to_num().double(), got.nan_to_num().double()
    difference, size = float((got - expected).abs().max()), float(expected.abs().max())
    return difference / (rounding * size) if difference > 0 else 0.0


# ---- outputs ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Gather:
    """The way from the features of this rank's images to those of all. ran: the images that it computed."""

    name: str
    group: Group | None
    images: Images
    rows: Mapping[str, Rows]
    owned: Sequence[Sequence[int]]
    own: Sequence[int]
    ran: Sequence[int]

    def __call__(self, path: str, x: Tensor) -> Tensor:
        """The features of all images. A collective, differentiable."""
        with transport_of(self.group).propagate_errors(self.name):
            place = self._place(path, x)
            counts = [] if place is None else self.images.counts(place)
            expected = sum(counts[image] for image in self.ran) if counts else -1
            if place is None or x.dim() <= place.dim or x.size(place.dim) != expected:
                raise InputError(
                    f"{self.name} returns {path} {tuple(x.shape)} for images of {[*self.images.patches]} patches, of "
                    f"which this rank computes {[*self.ran]}; expected the outputs of its first call"
                )
            if not self.own:
                x = x.narrow(place.dim, 0, 0)
        return all_gather_seq(x, layout_of(counts, self.owned), place.dim, sum(counts), self.group)

    def _place(self, path: str, x: Tensor) -> Rows | None:
        """Where an output holds the images. A collective where the first call has left it open: a rank whose images
        have one row each cannot tell."""
        place = self.rows.get(path)
        if place is None or place.perhaps is None or {*self.images.patches} == {place.perhaps} or x.dim() == 0:
            return place
        by_patches = Rows(0, place.perhaps)
        fits = x.size(0) == sum(self.images.counts(by_patches)[image] for image in self.ran)
        transport, what = transport_of(self.group), f"rows of {self.name}"
        with transport.agree(what, {}, x.device):
            fit = all_gather(torch.tensor(fits, dtype=torch.uint8, device=x.device), transport, what)
            return by_patches if bool(fit.all()) else place


def gathered(
    local: Any,
    images: Images,
    owned: Sequence[Sequence[int]],
    rank: int,
    group: Group | None,
    name: str,
    sent: Callable[[Tensor, Tensor], None],
) -> Any:
    """The outputs of a tower for all images, of those of a rank's own. sent(local, whole): told what travels."""
    own = owned[rank]
    mine = read(images.take(own), None)
    assert isinstance(mine, Images)
    rows = {path: place for path, x in _tensors(local) if (place := mine.rows(x)) is not None}
    gather = _Gather(name, group, images, rows, owned, own, own)

    def telling(path: str, x: Tensor) -> Tensor:
        whole = gather(path, x)
        sent(x, whole)
        return whole

    return _whole(local, telling)


def _whole(output: Any, gather: Callable[[str, Tensor], Tensor], path: str = "output") -> Any:
    """An output with the features of all images. Of a ModelOutput, each when it is read."""
    if isinstance(output, Tensor):
        return gather(path, output)
    if isinstance(output, ModelOutput):
        return Features(output, gather, path)
    if isinstance(output, dict):
        return {name: _whole(value, gather, f"{path}.{name}") for name, value in output.items()}
    if isinstance(output, list | tuple):
        return type(output)(_whole(value, gather, f"{path}.{index}") for index, value in enumerate(output))
    return output


@dataclass(eq=False)
class Features:
    """The outputs of a tower for all images, of which only those that the model reads travel.

    All ranks read the same ones, in the same order, since they run the same model. `local` is what this rank has
    computed, a field in which FSDP2 finds the tensors whose gradients it waits for.
    """

    local: Any
    _gather: Callable[[str, Tensor], Tensor] = field(repr=False)
    _path: str = field(default="output", repr=False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value, path = getattr(self.local, name), f"{self._path}.{name}"
        if name in _OF_ALL_LAYERS and isinstance(value, tuple):
            value = _Layers(value, self._gather, path)
        else:
            value = _whole(value, self._gather, path)
        setattr(self, name, value)
        return value

    def __getitem__(self, key: str | int) -> Any:
        return getattr(self, key if isinstance(key, str) else self._names[key])

    def to_tuple(self) -> tuple[Any, ...]:
        """Those that are not None, as a ModelOutput's."""
        return tuple(getattr(self, name) for name in self._names)

    @property
    def _names(self) -> list[str]:
        names = [each.name for each in fields(self.local)]
        return [name for name in names if vars(self).get(name, getattr(self.local, name)) is not None]


class _Layers(Sequence[Any]):
    """The outputs of all layers, each gathered when it is read."""

    def __init__(self, local: Sequence[Any], gather: Callable[[str, Tensor], Tensor], path: str) -> None:
        self._local, self._gather, self._path = local, gather, path
        self._whole: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._local)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        index = range(len(self))[index]
        if index not in self._whole:
            self._whole[index] = _whole(self._local[index], self._gather, f"{self._path}.{index}")
        return self._whole[index]


FEATURE = Feature(HOOKS | {"forward"}, _install)
