"""`python -m ringtile`, the same as the `ringtile` command."""

from ringtile.cli import command

command()
