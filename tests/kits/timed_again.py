"""Give each attempt of a test, and its teardown, a separate time limit.

pytest-timeout arms its timer once for all attempts of a test, and disarms it at the first failure: a second attempt, or
a teardown after a failure, would hang forever.
"""

from __future__ import annotations

import pytest
import pytest_timeout


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if getattr(item, "execution_count", 1) > 1:
        _arm(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _arm(item)


def _arm(item: pytest.Item) -> None:
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        item.ihook.pytest_timeout_cancel_timer(item=item)
        item.ihook.pytest_timeout_set_timer(item=item, settings=settings)
