"""`import ringtile.auto` enables ringtile on every Trainer built afterwards; RINGTILE_CONFIG names the YAML file.

`ringtile.auto.restore()` undoes it for Trainers that are not built yet.
"""

from __future__ import annotations

from ringtile.hf.auto import install

restore = install().restore
