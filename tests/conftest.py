import os
from pathlib import Path


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Many tests, and processes that tests start, compile the same small programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).parent.parent / ".pytest_cache/xla"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Never the user's own remembered timings.
os.environ["TANAGER_CACHE_DIR"] = str(
    Path(__file__).parent.parent / ".pytest_cache/timings"
)

import jax
import pytest

from tanager.clipping.autotune import Timings


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _methods_are_chosen_by_cost(request, monkeypatch):
    """Measuring every cell anew takes half of the time of a short run."""
    if "measures" not in request.keywords:
        monkeypatch.setattr(Timings, "measure", lambda *arguments, **options: None)
