"""What must not leave this machine in a report: the values of keys and variables that are named like secrets."""

from __future__ import annotations

import re
from typing import Any

# Keys of a configuration, at any depth: hub_token, wandb_api_key; not tile_tokens, eos_token_id.
_KEY = re.compile("(^|_)(token|api_key|password|secret)$", re.IGNORECASE)
# Variables are named by many programs, so more of them count: HF_TOKEN, AWS_ACCESS_KEY_ID, PGPASSFILE.
_VARIABLE = re.compile("token(?!izers)|key|secret|pass|credential|auth|cookie", re.IGNORECASE)
_LOGIN = re.compile(r"//[^/\s@]+@")  # of an address: //user:password@host


def without_secrets(value: Any, key: str = "") -> Any:
    """The same with "<hub_token>" for the value of hub_token, and so on."""
    if value is not None and _KEY.search(key):
        return f"<{key}>"
    if isinstance(value, dict):
        return {name: without_secrets(each, str(name)) for name, each in value.items()}
    return [without_secrets(each) for each in value] if isinstance(value, list) else value


def variable(name: str, value: str) -> str:
    """The value of an environment variable, for a report that others read."""
    return f"<{name}>" if _VARIABLE.search(name) else _LOGIN.sub("//<login>@", value)
