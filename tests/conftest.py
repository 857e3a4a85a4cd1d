"""The session's pools of ranks are closed when the session ends."""

from __future__ import annotations

import pytest
from pool import close_pools


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
