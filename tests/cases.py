"""Cases of a test: in every run, or in `make test-full` only."""

from collections.abc import Collection
from typing import Any

import pytest


def in_full(cases: Collection[Any], *more: Any) -> list[Any]:
    """Return parameters of a test: `more` of them in `make test-full` only."""
    assert all(each in cases for each in more)
    full = pytest.mark.full
    return [pytest.param(it, marks=full) if it in more else it for it in cases]


def tuples_in_full(cases: Collection[tuple], *more: tuple) -> list[Any]:
    """Return cases that hold each parameter of a test, as `in_full` does."""
    assert all(each in cases for each in more)
    full = pytest.mark.full
    return [pytest.param(*it, marks=[full] * (it in more)) for it in cases]
