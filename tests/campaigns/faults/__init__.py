"""`make faults`: hostile trials by the thousand, counted. Every module here holds one campaign."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS.parent), str(TESTS), *map(str, TESTS.iterdir())]  # campaigns share the helpers of the tests
