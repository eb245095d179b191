import gc
import os
from importlib.metadata import version
from pathlib import Path


# Two devices; and what runs once is compiled in a third of the time without optimising,
# which changes last digits only. With "--xla_force_host_platform_device_count=2" alone
# in XLA_FLAGS, the tests compile as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    " ".join(
        [
            "--xla_force_host_platform_device_count=2",
            "--xla_backend_optimization_level=0",
            "--xla_cpu_parallel_codegen_split_count=1",
            # Later versions do not know it, and stop.
            *["--xla_cpu_use_fusion_emitters=false"]
            * version("jaxlib").startswith("0.10."),
        ]
    ),
)
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

from tanager.clipping.planning.autotune import Timings


# Tracing makes many objects that live on; to look through all of them as often as
# Python does by default takes a tenth of the time.
gc.set_threshold(50_000, 20, 100)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Begin with the files that take long, so that no worker is left alone with one."""
    slow = {item.path for item in items if "slow" in item.keywords}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def _methods_are_chosen_by_cost(request, monkeypatch):
    """Measuring every cell anew takes half of the time of a short run."""
    if "measures" not in request.keywords:
        monkeypatch.setattr(Timings, "measure", lambda *arguments, **options: False)
