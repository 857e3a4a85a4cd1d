"""How fast this machine runs ringtile, and what else is installed: `python -m benchmarks SUBJECT`, from a checkout."""
