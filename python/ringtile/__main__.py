"""`python -m ringtile`, the same as the `ringtile` command."""

import sys

from ringtile.cli import main

sys.exit(main())
