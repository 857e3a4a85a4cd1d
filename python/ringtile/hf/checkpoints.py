"""Checkpoints that are whole, or refused by name.

A manifest lists every file of a checkpoint with its size. Rank 0 writes it once all ranks have written their files,
and reads none of them: the others are in the next step by then, and wait for it. Older checkpoints are deleted only
after that. While files are written or deleted, a draft stands in its place. A checkpoint is whole if its files have
the sizes that its manifest says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ringtile.errors import CheckpointError, RingtileError
from ringtile.hf.patches import Patches
from ringtile.hf.peers import Peers, of_a_collective

MANIFEST = "ringtile_manifest.json"
_DRAFT = f"{MANIFEST}.new"

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one Trainer, whose ranks share sequences."""

    def __init__(self, trainer: Trainer, peers: Peers) -> None:
        self._trainer, self._peers = trainer, peers

    def install(self, patches: Patches) -> None:
        patches.wrap(self._trainer, "_save_checkpoint", self._save)
        patches.wrap(self._trainer, "train", self._train)

    # ---- saving ---------------------------------------------------------------------------------

    def _save(self, original: Callable[..., Any], model: Any, trial: Any) -> None:
        """Saves as the original does, then writes the manifest, then deletes older checkpoints.

        Raises CheckpointError when a file cannot be written; the other ranks raise PeerLostError.
        """
        trainer, args = self._trainer, self._trainer.args
        run = pathlib.Path(trainer._get_output_dir(trial=trial))
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        limit, args.save_total_limit = args.save_total_limit, None  # the original deletes before all ranks are done
        try:
            if args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                _empty(folder)
            trainer.accelerator.wait_for_everyone()  # the others write into it
            original(model, trial)
            trainer.accelerator.wait_for_everyone()
            if args.should_save:
                _write_manifest(folder)
        except Exception as error:
            if isinstance(error, RingtileError) or of_a_collective(error):
                raise
            failure = CheckpointError(
                f"{folder} could not be saved on rank {args.process_index}: {' '.join(str(error).split())}; "
                f"{_last_whole(run, but=folder)}"
            )
            self._peers.leave(failure)
            raise failure from error
        finally:
            args.save_total_limit = limit
        if args.should_save and limit is not None and limit > 0:
            best = trainer.state.best_model_checkpoint
            _delete_older(run, limit, kept={folder, *([pathlib.Path(best)] if best else [])})

    # ---- resuming -------------------------------------------------------------------------------

    def _train(
        self, original: Callable[..., Any], resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """The original, which gets a checkpoint that is whole, on every rank the same."""
        if not resume_from_checkpoint:
            return original(resume_from_checkpoint, *args, **kwargs)
        path, during, arguments = self._checked(resume_from_checkpoint), Patches(), self._trainer.args
        if arguments.device.type == "cpu":  # accelerate calls the CPU of a rank cpu:0, which torch.load does not know
            during.set(arguments, "_setup_devices", torch.device("cpu"))
        try:
            return original(path, *args, **kwargs)
        finally:
            during.restore()

    def _checked(self, resume: str | os.PathLike[str] | bool) -> str:
        answer: list[Any] = [None, None]  # (path, what is wrong)
        if self._trainer.args.process_index == 0:
            try:
                folder = find(self._trainer.args.output_dir) if resume is True else check(pathlib.Path(str(resume)))
                _check_engine(folder, _engine_of(self._trainer))
                answer[0] = folder
            except CheckpointError as error:
                answer[1] = str(error)
        dist.broadcast_object_list(answer)
        path, wrong = answer
        if wrong is not None:
            raise CheckpointError(wrong)
        return str(path)


def find(output_dir: str | None) -> pathlib.Path:
    """The last whole checkpoint of a training; damaged ones are logged. Raises CheckpointError when there is none."""
    skipped: list[str] = []
    for folder in _checkpoints(pathlib.Path(output_dir or ".")):
        if (damage := damage_of(folder)) is None:
            for each in skipped:
                logger.warning("resume_from_checkpoint: skipped %s", each)
            return check(folder)
        skipped.append(f"{folder}: {damage}")
    found = "; ".join(skipped) or "no checkpoint"
    raise CheckpointError(
        f"resume_from_checkpoint: {output_dir} holds {found}; expected a whole checkpoint: to start anew, leave it out"
    )


def check(folder: pathlib.Path) -> pathlib.Path:
    """The folder of a whole checkpoint. One without a manifest passes with a warning. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"resume_from_checkpoint is {folder}, which is no folder; expected that of a checkpoint")
    if (damage := damage_of(folder)) is not None:
        raise CheckpointError(
            f"resume_from_checkpoint: {folder} is damaged: {damage}; {_last_whole(folder.parent, but=folder)}"
        )
    if not (folder / MANIFEST).exists():
        logger.warning(
            "resume_from_checkpoint: %s has no %s: it was saved without ringtile, and may be damaged", folder, MANIFEST
        )
    return folder


_PLAIN = "DDP or one process"


def _engine_of(trainer: Trainer) -> str:
    if trainer.is_fsdp_enabled:
        return f"FSDP ({trainer.accelerator.state.fsdp_plugin.state_dict_type.name})"
    return "DeepSpeed" if trainer.is_deepspeed_enabled else _PLAIN


def _check_engine(folder: pathlib.Path, engine: str) -> None:
    """Raises CheckpointError if another engine saved the state of the optimizer, which this one would not find."""
    engines = {
        "optimizer.pt": _PLAIN,
        "optimizer.bin": "FSDP (FULL_STATE_DICT)",
        "optimizer_0": "FSDP (SHARDED_STATE_DICT)",
        "latest": "DeepSpeed",
    }
    saved = next((engines[path.name] for path in folder.iterdir() if path.name in engines), None)
    if saved not in (None, engine):  # without any (save_only_model), transformers begins with a new optimizer
        raise CheckpointError(
            f"resume_from_checkpoint: {folder} was saved under {saved}, and this training runs under {engine}; "
            "expected the same: change this training's, or start anew from its weights"
        )


def damage_of(folder: pathlib.Path) -> str | None:
    """The first difference between a checkpoint and its manifest; None: it is whole, or has no manifest."""
    try:
        files: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="ascii"))["files"]
        for name in (TRAINER_STATE_NAME, *files):  # transformers does not resume without the former
            size = files[name]
            if not (folder / name).is_file():
                return f"{name} is missing"
            if (got := (folder / name).stat().st_size) != size:
                return f"{name} has {got} bytes, {size} were saved"
    except FileNotFoundError:
        if (folder / _DRAFT).exists():
            return "its training ended while it was being saved or deleted"
        # Of all files of a checkpoint, transformers writes this one last.
        return None if (folder / TRAINER_STATE_NAME).exists() else f"{TRAINER_STATE_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def _last_whole(run: pathlib.Path, but: pathlib.Path) -> str:
    for folder in _checkpoints(run):
        if folder.resolve() != but.resolve() and (folder / MANIFEST).exists() and damage_of(folder) is None:
            return f"the last whole checkpoint is {folder}: set resume_from_checkpoint to it, or to true"
    return "there is no other whole checkpoint"


def _checkpoints(run: pathlib.Path) -> list[pathlib.Path]:
    """The checkpoints of a training, the last one first."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = {path.name.removeprefix(prefix): path for path in run.glob(f"{prefix}*") if path.is_dir()}
    return [folders[step] for step in sorted(filter(str.isdecimal, folders), key=int, reverse=True)]


# ---- deleting -----------------------------------------------------------------------------------


def _delete_older(run: pathlib.Path, limit: int, kept: Set[pathlib.Path]) -> None:
    """Deletes the oldest checkpoints until `limit` are left, or those that must be kept."""
    checkpoints = [pathlib.Path(path) for path in sort_checkpoints(str(run), use_mtime=True)]
    surplus = max(len(checkpoints) - limit, 0)
    for folder in [path for path in checkpoints if path not in kept][:surplus]:
        with contextlib.suppress(OSError):
            _empty(folder)
            shutil.rmtree(folder)


def _empty(folder: pathlib.Path) -> None:
    """Deletes the files of a checkpoint, which is damaged from the first one on: a draft is left.

    Several nodes may do so at once.
    """
    with contextlib.suppress(FileNotFoundError):
        (folder / MANIFEST).replace(folder / _DRAFT)
    (folder / _DRAFT).touch()
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _DRAFT:
            path.unlink(missing_ok=True)


# ---- the manifest -------------------------------------------------------------------------------


def _write_manifest(folder: pathlib.Path) -> None:
    """Writes a draft, which then takes the manifest's place: sizes in bytes by path in the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(MANIFEST)]
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    with (folder / _DRAFT).open("w", encoding="ascii") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    (folder / _DRAFT).replace(folder / MANIFEST)
