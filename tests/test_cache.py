"""Folders of this user."""

import pathlib

import pytest

import tanager
from tanager._cache import cache_folder, expanded, state_folder


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


def test_the_home_of_nobody_is_a_name_like_others(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/images") == tmp_path / "images"
    assert expanded("~nobody-has-this-name/images").name == "images"
    with pytest.raises(ValueError, match="~nobody-has-this-name/images"):
        tanager.load("~nobody-has-this-name/images")
