"""tanager: train image models with differential privacy, in JAX.

Names are loaded on first use, so that planning a budget does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tanager._version import __version__ as __version__


if TYPE_CHECKING:
    from tanager.privacy.mechanism import Adjacency as Adjacency
    from tanager.privacy.mechanism import Mechanism as Mechanism
    from tanager.seed import Seed as Seed

_HOMES = {
    "Adjacency": "tanager.privacy.mechanism",
    "Mechanism": "tanager.privacy.mechanism",
    "Seed": "tanager.seed",
}

__all__ = ["Adjacency", "Mechanism", "Seed", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tanager' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
