"""The command line: one clear message, and the right exit status."""

import pytest

import tanager
from tanager.cli import main


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tanager {tanager.__version__}\n"
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean train?"),
        (["train", "cifar10-wrn-16"], "did you mean cifar10-wrn-16-4?"),
        (["train", "--batch-size", "5000"], "batch_size (=5000) must be at most the"),
        (["train", "--epsilon", "-1"], "epsilon (=-1.0) must be positive"),
        (["train", "--delta", "2"], "delta (=2.0) must be"),
        (["train", "--optimizer", "adamm"], "did you mean adam?"),
        (["train", "--model", "wrn-16-5x"], "model (='wrn-16-5x')"),
        (["train", "cifar10-wrn-16-4", "--data", "/nowhere"], "/nowhere"),
        (
            ["train", "--epsilon", "1", "--steps", "9", "--noise-multiplier", "0.9"],
            "epsilon (=1.0) is less than these settings spend",
        ),
    ],
)
def test_bad_input_gives_one_message(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: ")
    assert message in error
    assert "Traceback" not in error


def test_an_unknown_field_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["train", "--lerning-rate", "3"])
    assert refused.value.code == 2
    assert "--learning-rate" in capsys.readouterr().err


def test_recipes_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in ("digits", "cifar10-wrn-16-4", "cifar10-wrn-40-4", "folder"):
        assert name in printed
    assert "79.5" in printed
