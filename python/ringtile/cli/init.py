"""`ringtile init KIND FOLDER`: writes a project that trains as it is, to be changed: a script, its YAML, launch files.

The texts lie in projects/, each once; a project is some of them, joined. "@name@" in them is filled in.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.resources
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping

from ringtile.cli import Outcome
from ringtile.cli.output import check_output_folder
from ringtile.config import nearest_key
from ringtile.errors import EXTRAS, ConfigError

LAUNCH = {name: (name,) for name in ("launch/torchrun_two_nodes.sh", "launch/slurm.sbatch")}


@dataclasses.dataclass(frozen=True)
class Project:
    """What `ringtile init` writes for one kind."""

    title: str
    files: Mapping[str, tuple[str, ...]]  # by name: the texts of projects/ that are joined
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)  # pip's names by the modules', beside ours
    program: str = "train.py"
    first: str = ""  # the command to run before the others
    change: str = "set `MODEL` in `train.py`"
    settings: str = "ringtile.yaml"
    note: str = "`training.yaml` has the Trainer's."
    arguments: str = "TrainingArguments"
    steps: str = "5 "  # as wide as another's, before a comment
    batch: str = "2"
    optimizer: str = "sgd                  # adamw_torch for a real model"
    learning_rate: str = "0.1 "


def script(name: str, *training: str) -> dict[str, tuple[str, ...]]:
    """The files of a project whose train.py is the text `name`; training: the texts of training.yaml."""
    settings = {"training.yaml": training} if training else {}
    return {"train.py": (name,), "tiny_model.py": ("tiny_model.py",), "ringtile.yaml": ("ringtile.yaml",)} | settings


PROJECTS = {
    "trainer": Project("Hugging Face Trainer", script("train_trainer.py", "training.yaml")),
    "sft": Project(
        "TRL's SFTTrainer",
        script("train_sft.py", "training.yaml", "training_sft.yaml"),
        packages={"trl": "trl"},
        arguments="TrainingArguments, which SFTConfig has too",
    ),
    "grpo": Project(
        "TRL's GRPOTrainer",
        script("train_grpo.py", "training.yaml", "training_grpo.yaml"),
        packages={"trl": "trl"},
        change="set `MODEL`, `ROWS` and `reward` in `train.py`",
        arguments="TrainingArguments, which GRPOConfig has too",
        steps="40",
        batch="8",
        optimizer="adamw_torch          # or sgd, adafactor, ...",
        learning_rate="0.01",
    ),
    "vlm": Project(
        "TRL's SFTTrainer, with images",
        script("train_vlm.py", "training.yaml", "training_vlm.yaml") | {"tiny_vlm.py": ("tiny_vlm.py",)},
        packages={"trl": "trl", "PIL": "pillow"},
        change="set `MODEL` and `row` in `train.py`",
        arguments="TrainingArguments, which SFTConfig has too",
    ),
    "axolotl": Project(
        "axolotl",
        {"axolotl.yaml": ("axolotl.yaml",), "tiny_model.py": ("tiny_model.py",)},
        packages={"axolotl": "axolotl"},
        program="-m axolotl.cli.train axolotl.yaml",
        first="    python tiny_model.py      # the tiny model and examples, once\n",
        change="set `base_model` in `axolotl.yaml`",
        settings="axolotl.yaml",
        note="The other keys are axolotl's, which needs GPUs.",
    ),
    "torch": Project(
        "A plain PyTorch loop", script("train_torch.py"), note="The loop in `train.py` shards each batch itself."
    ),
    "zero3": Project(
        "Hugging Face Trainer under DeepSpeed ZeRO-3",
        script("train_trainer.py", "training.yaml", "training_zero3.yaml"),
        packages={"deepspeed": "deepspeed"},
        note="`training.yaml` has the Trainer's and DeepSpeed's. On a CPU, DeepSpeed compiles for a minute first.",
    ),
    "fsdp2": Project(
        "Hugging Face Trainer under FSDP2",
        script("train_trainer.py", "training.yaml", "training_fsdp2.yaml"),
        note="`training.yaml` has the Trainer's and FSDP's. On a CPU accelerate does not start FSDP2.",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join(f"{kind} ({project.title})" for kind, project in PROJECTS.items())
    parser.add_argument("kind", metavar="KIND", help=kinds)
    parser.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="a new folder, or an empty one")


def run(args: argparse.Namespace) -> Outcome:
    """Writes the project, and prints its README, which has the commands."""
    if args.kind not in PROJECTS:
        raise ConfigError(f"unknown kind {args.kind[:80]!r}: {nearest_key(args.kind, PROJECTS)}")
    project, folder = PROJECTS[args.kind], args.folder
    texts = {name: filled(args.kind, name) for name in ("README.md", *project.files, *LAUNCH)}
    with contextlib.ExitStack() as undo:
        for place in reversed((folder, *folder.parents)):
            if not place.exists():
                undo.callback(remove, place)
        check_empty(folder)
        write(folder, texts, undo)
        undo.pop_all()
    print(f"{folder}: {', '.join(texts)}\n\n{texts['README.md']}", end="")
    missing = [pip for module, pip in needed(project).items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"ringtile: not installed yet: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
    return Outcome(0, {"kind": args.kind, "folder": str(folder), "files": list(texts), "missing": missing})


def needed(project: Project) -> dict[str, str]:
    """What pip installs for a project, by module, without torch and ringtile itself."""
    return {"transformers": "transformers", "accelerate": "accelerate", "datasets": "datasets", **project.packages}


def filled(kind: str, name: str) -> str:
    """The text of one file of a project."""
    project, texts = PROJECTS[kind], importlib.resources.files("ringtile.cli") / "projects"
    values = dataclasses.asdict(dataclasses.replace(project, packages={}, files={})) | {
        "kind": kind,
        "packages": " ".join([*([EXTRAS["train"]] * (kind != "axolotl")), *project.packages.values()]),
    }
    sources = ({**project.files, **LAUNCH}).get(name, (name,))
    text = "".join(texts.joinpath(source).read_text(encoding="ascii") for source in sources)
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    return text


def check_empty(folder: pathlib.Path) -> None:
    """ConfigError: the folder is none, holds something, or cannot be written to."""
    if folder.is_dir() and (held := sorted(os.listdir(folder))):
        some = ", ".join(held[:3]) + (", ..." if len(held) > 3 else "")
        raise ConfigError(f"{folder} is not empty (it has {some}); expected a new folder, or an empty one")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected a new folder, or an empty one")
    check_output_folder(folder, "FOLDER")


def write(folder: pathlib.Path, texts: Mapping[str, str], undo: contextlib.ExitStack) -> None:
    """Writes new files; what is there already stays. undo: gets how to remove what was made."""
    try:
        for name, text in texts.items():
            path = folder / name
            if not path.parent.exists():
                path.parent.mkdir()
                undo.callback(remove, path.parent)
            with path.open("x") as file:
                undo.callback(remove, path)
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}), so nothing of the project is left; expected a writable folder "
            f"with space for {sum(map(len, texts.values()))} bytes"
        ) from error


def remove(path: pathlib.Path) -> None:
    """Removes a file, or a folder that holds nothing."""
    with contextlib.suppress(OSError):
        path.rmdir() if path.is_dir() else path.unlink()
