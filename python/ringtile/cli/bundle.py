"""`ringtile doctor --bundle FILE`: one archive for a bug report: what redaction.py knows to be harmless."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable
from typing import Any

from ringtile.cli.output import write_output
from ringtile.cli.redaction import known, variable, without_paths
from ringtile.errors import ConfigError

# Of the variables that change what is computed, or where; of all others not even the names.
_PREFIXES = (
    *("RINGTILE_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_"),
    *("ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "SLURM_", "RAY_"),
    *("PYTHON", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "LD_", "PATH", "VIRTUAL_ENV", "CONDA_"),
)


def write_bundle(
    path: pathlib.Path, report: dict[str, Any], table: Callable[[dict[str, Any]], str], config: pathlib.Path | None
) -> list[str]:
    """Writes a zip archive; returns the names in it. report: doctor's; table: makes its text."""
    shared = shareable(report)
    texts = {
        "doctor.txt": table(shared),
        "doctor.json": json.dumps(shared, indent=1) + "\n",
        "packages.txt": "".join(f"{line}\n" for line in packages()),
        "environment.txt": "".join(f"{name}={value}\n" for name, value in variables().items()),
    }
    for name, source in (("config.yaml", config), ("ringtile_config.yaml", os.environ.get("RINGTILE_CONFIG"))):
        if source:
            texts[name] = config_text(name, pathlib.Path(source))

    def write(file: pathlib.Path) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, text)

    write_output(path, write)
    return list(texts)


def shareable(report: dict[str, Any]) -> dict[str, Any]:
    """doctor's report without paths, and without the values of variables that may hold one."""
    kernels = {name: without_paths(each) if isinstance(each, str) else each for name, each in report["kernels"].items()}
    if (binary := report["kernels"]["binary"]) is not None:
        kernels["binary"] = pathlib.Path(binary).name
    values = {name: variable(name, value) for name, value in report["environment"].items()}
    return report | {"kernels": kernels, "environment": values}


def packages() -> list[str]:
    """Every installed package, as pip freezes it, without the address that it came from."""
    found = {(each.name or "?", each.version) for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found, key=lambda pair: pair[0].lower())]


def variables() -> dict[str, str | None]:
    """The variables that concern a run, with the values that are known to be harmless."""
    return {name: variable(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def config_text(name: str, path: pathlib.Path) -> str:
    """The known keys of a YAML file, without comments; where it cannot be read, only why."""
    try:
        import yaml

        from ringtile.yaml_file import read_yaml

        text: str = yaml.safe_dump(known(dict(read_yaml(path))), sort_keys=False)
        return text
    except ModuleNotFoundError as error:
        return f"# {name} is left out: {error.name} is not installed\n"
    except ConfigError as error:  # whose text may quote a value
        line = re.search(r"line \d+", str(error))
        return f"# {name} is left out: it is no YAML file that ringtile reads{f' ({line[0]})' if line else ''}\n"
