"""The session's pools of ranks are closed when the session ends."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("hf_training")

from pool import close_pools  # noqa: E402


def pytest_sessionfinish(session: pytest.Session) -> None:
    close_pools()
