"""From a group, or its name, to this rank's transport."""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch
import torch.distributed as dist

# Imported before there is a group. Its functions keep the world's group of that moment, as a default argument, until
# Python ends; the first call of an op of ours would make torch import it.
import torch.distributed.nn.functional
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from ringtile.errors import InputError, shown
from ringtile.transport.loopback import LoopbackGroup, LoopbackWorld, loopback_groups
from ringtile.transport.process_group import ProcessGroupTransport
from ringtile.transport.transport import Transport

Group = dist.ProcessGroup | DeviceMesh | LoopbackGroup | str

_ALONE = LoopbackWorld(1).groups[0].transport
# Weak: they say which transport belongs to a living group, and keep nothing alive.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupTransport] = weakref.WeakKeyDictionary()
_transports_lock = threading.Lock()


def group_name(group: Group | None) -> str:
    """Return the name by which an op, which takes no objects, refers to a group; "" for None."""
    if group is None:
        return ""
    group = group_of_mesh(group)
    return group if isinstance(group, str) else str(group.group_name)


def group_of_mesh(group: Group) -> dist.ProcessGroup | LoopbackGroup | str:
    """Return the group of a mesh, or the group itself. InputError: the mesh has several dimensions."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise InputError(f"the mesh has dimensions {group.mesh_dim_names}; pass one of them, as in mesh['cp']")
    return group.get_group()


def transport_of(group: Group | None) -> Transport:
    """Return this rank's end of a group, or of the group with that name; of a world of one rank for None and "".

    Raises InputError when no group of that name is alive.
    """
    if group is None or group == "":
        return _ALONE
    group = group_of_mesh(group)
    if isinstance(group, str):
        if group in loopback_groups:
            return loopback_groups[group].transport
        try:
            group = _resolve_process_group(GroupName(group))
        except RuntimeError as error:
            raise InputError(f"there is no process group named {group!r}: {str(error).splitlines()[0]}") from None
    if isinstance(group, LoopbackGroup):
        return group.transport
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"the group is {shown(group)}; expected a process group that this rank is a member of, or a DeviceMesh of "
            f"one dimension"
        )
    with _transports_lock:
        if group not in _transports:
            _transports[group] = ProcessGroupTransport(group)
        return _transports[group]


def propagate_errors(group: Group | None, op: str, x: object) -> contextlib.AbstractContextManager[None]:
    """Do `Transport.propagate_errors` of a group for a call of op on x; nothing while the call is only traced."""
    return contextlib.nullcontext() if is_traced(x) else transport_of(group).propagate_errors(op)


def is_traced(x: object) -> bool:
    """Return whether x stands for a tensor of a later run: a compiler's fake one."""
    return torch.compiler.is_compiling() or (isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter))


def only_group_of(world_size: int) -> dist.ProcessGroup | None:
    """Return the group that a call over so many ranks must mean when it names none; None: none, or a choice."""
    if world_size == 1 or not dist.is_initialized():
        return None
    found = [group for group in dist.distributed_c10d._world.pg_map if dist.get_world_size(group) == world_size]
    return found[0] if len(found) == 1 else None
