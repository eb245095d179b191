import pytest

from switch import FULL
from tanager.clipping.analysis import batches


@pytest.fixture(autouse=True)
def _no_remembered_timings(tmp_path, monkeypatch):
    """Every test starts with an empty timing cache, and never the user's."""
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(tmp_path / "timings"))


@pytest.fixture(autouse=True)
def _as_on_one_device(monkeypatch):
    """What may be split over devices is traced twice: tests/parallel tests that."""
    if not FULL:
        monkeypatch.setattr(batches, "may_be_split", lambda leaves: False)
