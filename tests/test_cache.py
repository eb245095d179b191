"""Folders of this user."""

import pathlib

import pytest

from tanager._cache import cache_folder, state_folder


@pytest.mark.parametrize("folder", [cache_folder, state_folder])
def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path, folder):
    own = f"TANAGER_{folder.__name__.partition('_')[0].upper()}_DIR"
    for name in (own, "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    with pytest.raises(OSError, match=f"no home folder: name a folder with {own}"):
        folder()
    monkeypatch.setenv(own, str(tmp_path))
    assert folder() == tmp_path
