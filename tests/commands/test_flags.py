"""What flags take: each mistake gives one message, not the box of tyro."""

import pytest

from tanager.cli import main
from tanager.commands import flags, train


MOMENTUM = "cifar10-scattering"  # its recipe has a momentum


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --epsilon", "--epsilon (='') needs a value: `tanager train digits"),
        ("train --model= --steps 3", "--model (='') needs a value"),
        ("train --classes --steps 3", "--classes (='') needs a value"),
        ("plan --steps --examples 3", "--steps (='') needs a value: `tanager plan --"),
        ("train --epsilon 3 4", "--epsilon (='3 4') takes one value"),
        ("train -epsilon 3", "word (='-epsilon') belongs to no flag: `tanager train d"),
        ("train --flip True", "--flip (='True') takes no value"),
        ("train --flip=True", "--flip (='True') takes no value: write --flip alone"),
        ("runs --json=True", "--json (='True') takes no value"),
        ("train --augmentation rcc", "(='rcc') is unknown: did you mean rrc?"),
        ("train --stream maybe", "--stream (='maybe') must be one of True, False"),
        ("train --physical-batch-size x", "must be a whole number or auto"),
        ("train --lora-rank None", "--lora-rank (='None') must be a whole number"),
        ("audit --canary-kinds noise x", "(='x') must be one of blank, noise, misl"),
        ("search privacy digits --try-steps 1 x", "--try-steps (='x') must be a whole"),
        ("bench scaling --step-seconds 1 x", "--step-seconds (='x') must be a number"),
        ("completion csh", "shell (='csh') must be one of bash, zsh, fish"),
        ("plan --accountant foo", "--accountant (='foo') must be one of pld, rdp"),
        ("plan", "--examples (=None) must be given: number of training examples N"),
        ("account limit --epsilon 3", "--delta (=None) must be given: δ of that ε"),
        ("account add --delta 1e-5", "runs (=None) must be given: folders of runs"),
        ("report", "run (=None) must be given: folder of a finished run"),
        ("export --to x", "run (=None) must be given"),
        ("evaluate --batch-size=3", "model (=None) must be given: folder of a fin"),
        ("bench", "what to measure (='') must be one of step, memory"),
        ("bench step x", "word (='x') belongs to no flag: `tanager bench step --help`"),
        (f"train {MOMENTUM} --optimizer-options momentum", "names, each with a number"),
        (f"train {MOMENTUM} --optimizer-options momentum x", "a number after each"),
        (f"train {MOMENTUM} --optimizer-options momentum=3", "momentum 0.9"),
        (f"train {MOMENTUM} --optimizer-options.momentum 3", "--optimizer-options? `"),
    ],
)
def test_a_mistake_in_a_flag_gives_one_message(capsys, words, message):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("words", [["runs", ""], ["report", ""]])
def test_an_empty_word_names_no_folder(capsys, words):
    # As of a shell's variable that is not set; as a path it would be this folder.
    assert main(words) == 2
    assert "(='') is empty" in capsys.readouterr().err


def test_a_flag_of_pairs_is_written_alike_whatever_the_recipe_holds():
    words = ["--optimizer-options", "momentum", "3", "dampening", "0.5"]
    for name in ("digits", MOMENTUM):
        recipe = flags.parse("train", [name, *words], train.Options)[1]
        assert recipe.optimizer_options == {"momentum": 3.0, "dampening": 0.5}
        one = [name, "--optimizer-options=a", "1"]
        recipe = flags.parse("train", one, train.Options)[1]
        assert recipe.optimizer_options == {"a": 1.0}
    recipe = flags.parse("train", [MOMENTUM], train.Options)[1]
    assert recipe.optimizer_options == {"momentum": 0.9}


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_model_that_is_not_there_is_named_as_in_help(capsys, command):
    assert main([command, "none", *["x.png"] * (command == "predict")]) == 2
    assert "error: model (='none') does not exist" in capsys.readouterr().err
