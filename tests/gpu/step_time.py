"""Where the time of a profiled training step goes: attention, MLP, loss, the rest.

An operation belongs to the innermost range around it that has a name below: a module of the model, a function of
ringtile or torch. One of the backward belongs to where the operation that it differentiates does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

# Parts of the names of ranges, in small letters.
RANGES = {
    "attention": ("ringattention", "ringtile::ring_attention", "scaled_dot_product"),
    "MLP": ("step: mlp",),
    "loss": ("step: lm_head", "_reduced", "_pertoken", "cross_entropy", "nll_loss", "log_softmax"),
}
NODE = "autograd::engine::evaluate_function: "


@contextlib.contextmanager
def watched(model: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Inside, the modules of these names, such as "mlp", run in ranges of their own."""
    ranges: list[Any] = []
    handles = []

    def enter(name: str) -> Any:
        def hook(*unused: Any) -> None:
            ranges.append(record_function(f"step: {name}"))
            ranges[-1].__enter__()

        return hook

    def leave(*unused: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    for path, module in model.named_modules():
        if (name := path.rpartition(".")[2]) in names:
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def shares(events: Iterable[Any]) -> dict[str, float]:
    """Return each part's share of the device's time, or, where no device has run anything, of the CPU's."""
    on_cpu = [event for event in events if event.device_type == torch.profiler.DeviceType.CPU]
    on_device = any(event.self_device_time_total for event in on_cpu)
    forwards: dict[
        tuple[int, int], Any
    ] = {}  # by thread and number: of those that began with it, the last made the node
    for event in sorted(on_cpu, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not event.name.startswith(NODE) and not _is_of_node(event):
            forwards[event.thread, event.sequence_nr] = event
    seconds: Counter[str] = Counter()
    for event in on_cpu:
        if time := event.self_device_time_total if on_device else event.self_cpu_time_total:
            seconds[_part(event, forwards)] += time
    total = sum(seconds.values())
    return {part: seconds[part] / total for part in (*RANGES, "rest")} if total else {}


def _part(event: Any, forwards: dict[tuple[int, int], Any]) -> str:
    at: Any = event
    while at is not None:
        name = at.name.lower()
        for part, names in RANGES.items():
            if any(each in name for each in names):
                return part
        forward = forwards.get((at.fwd_thread, at.sequence_nr)) if at.name.startswith(NODE) else None
        at = forward or at.cpu_parent
    return "rest"


def _is_of_node(event: Any) -> bool:
    """Return whether this is the node's own work, which has its number too."""
    parent = event.cpu_parent
    return parent is not None and parent.name.startswith(NODE) and bool(parent.sequence_nr == event.sequence_nr)
