"""Arrays that XLA splits over devices by itself: right, or refused by name."""

import pytest

from scripts import on_devices
from switch import FULL
from tanager.clipping.planning.choices import STRATEGIES


def found(tmp_path, devices, *words):
    # Threads for all virtual devices: one that waits for another holds its own.
    more = {"TANAGER_CACHE_DIR": str(tmp_path), "NPROC": "16"}
    return on_devices(devices, "on_split_arrays.py", *words, **more)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_no_strategy_is_wrong_on_split_arrays(tmp_path, devices):
    """Sums, norms and losses against float64 on one device, in units of C."""
    paths = found(tmp_path, devices)
    assert "axes of type Explicit" in paths.pop("refused")
    assert max(paths.pop("in parts", {"": 0.0}).values()) < 1e-3
    assert len(paths) == 2
    tried = set()
    for path, strategies in paths.items():
        tried |= strategies.keys()
        for strategy, error in strategies.items():
            where = path, strategy, error
            assert error["sum"] < 1e-3, where
            assert error["norms"] < 1e-3 and error["losses"] < 1e-5, where
            if FULL or path != "results_asked_for":
                assert error["masked"] < 1e-3, where
                assert 0 < error["moved"] <= 1.001, where
    assert tried == STRATEGIES.keys() - {"ghost", "mixed_ghost"}


@pytest.mark.slow
def test_planted_xla_splits_convolutions_of_examples_wrongly(tmp_path):
    """Without the guard, as XLA's partitioner has it (jax-ml/jax issue 32157)."""
    strategies = found(tmp_path, 3, "unguarded")["rows_constrained"]
    assert max(error["sum"] for error in strategies.values()) > 1
