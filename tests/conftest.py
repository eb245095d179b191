import os
from pathlib import Path


os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from tanager.clipping.autotune import Timings


# Many tests compile the same small programs; half of their time went there.
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
# Never the user's own remembered timings.
os.environ["TANAGER_CACHE_DIR"] = str(CACHE.parent / "timings")
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def _methods_are_chosen_by_cost(request, monkeypatch):
    """Measuring every cell anew takes half of the time of a short run."""
    if "measures" not in request.keywords:
        monkeypatch.setattr(Timings, "measure", lambda *arguments, **options: None)
