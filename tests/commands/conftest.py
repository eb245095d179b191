import pytest

from tanager.cli import main


@pytest.fixture
def printed(capsys):
    """Run a command, and return its exit code, what it printed and its errors."""

    def run(*words):
        capsys.readouterr()
        code = main([*map(str, words)])
        return code, *capsys.readouterr()

    return run
