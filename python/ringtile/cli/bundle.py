"""`ringtile doctor --bundle FILE`: one archive for a bug report, without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import zipfile
from typing import Any

from ringtile.cli.output import write_output
from ringtile.cli.redaction import variable, without_secrets
from ringtile.errors import ConfigError

# The variables that change what is computed, or where; all others stay out, whatever their names.
_PREFIXES = (
    *("RINGTILE_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_"),
    *("ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "SLURM_", "RAY_"),
    *("PYTHON", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "LD_", "PATH", "VIRTUAL_ENV", "CONDA_"),
)


def write_bundle(path: pathlib.Path, report: dict[str, Any], table: str, config: pathlib.Path | None) -> list[str]:
    """Writes a zip archive; returns the names in it. report, table: doctor's, as a mapping and as text."""
    texts = {
        "doctor.txt": table,
        "doctor.json": json.dumps(report, indent=1) + "\n",
        "packages.txt": "".join(f"{line}\n" for line in packages()),
        "environment.txt": "".join(f"{name}={value}\n" for name, value in variables().items()),
    }
    for name, source in (("config.yaml", config), ("ringtile_config.yaml", os.environ.get("RINGTILE_CONFIG"))):
        if source:
            texts[name] = config_text(pathlib.Path(source))

    def write(file: pathlib.Path) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in texts.items():
                archive.writestr(name, text)

    write_output(path, write)
    return list(texts)


def packages() -> list[str]:
    """Every installed package, as pip freezes it, without the address that it came from."""
    found = {(each.name or "?", each.version) for each in importlib.metadata.distributions()}
    return [f"{name}=={version}" for name, version in sorted(found, key=lambda pair: pair[0].lower())]


def variables() -> dict[str, str]:
    """The variables that concern a run, without secrets."""
    return {name: variable(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def config_text(path: pathlib.Path) -> str:
    """A YAML file again, without secrets and comments; where it cannot be read, only why."""
    try:
        import yaml

        from ringtile.yaml_file import read_yaml

        text: str = yaml.safe_dump(without_secrets(dict(read_yaml(path))), sort_keys=False)
        return text
    except ModuleNotFoundError as error:
        return f"# {path.name} is left out: {error.name} is not installed\n"
    except ConfigError as error:  # whose text may quote a value
        line = re.search(r"line \d+", str(error))
        return f"# {path.name} is left out: it is no YAML file that ringtile reads{f' ({line[0]})' if line else ''}\n"
