import pytest


@pytest.fixture(autouse=True)
def _no_remembered_timings(tmp_path, monkeypatch):
    """Every test starts with an empty timing cache, and never the user's."""
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(tmp_path / "timings"))
