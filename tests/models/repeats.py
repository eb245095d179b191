"""Cases whose layers other cases have too."""

from collections.abc import Iterable
from typing import Any

import pytest


def repeated(cases: Iterable[Any], *which: Any) -> list[Any]:
    """Return the cases, with these for `make test-full` only."""
    full = pytest.mark.full
    return [pytest.param(it, marks=full) if it in which else it for it in cases]
