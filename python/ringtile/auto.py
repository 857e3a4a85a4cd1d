"""`import ringtile.auto` enables ringtile on every Trainer built afterwards, from the YAML file in RINGTILE_CONFIG.

`ringtile.auto.restore()` stops that: Trainers built later are left alone.
"""

from __future__ import annotations

from ringtile.errors import needs_extra

with needs_extra("ringtile.auto", "hf"):
    from ringtile.hf.trainer import enable_every_trainer

restore = enable_every_trainer().restore
