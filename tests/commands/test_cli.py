"""The command line: one clear message, and the right exit status."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import tanager
from tanager import recipes
from tanager.cli import main
from tanager.commands import experiments, flags, plan, train
from tanager.recipes import runner
from tanager.training.estimate import Estimate


PLAN = ["plan", "--examples=9", "--batch-size=3"]
SHORT = ["train", "digits", "--model", "linear", "--steps", "2", "--strategy", "bk"]
SHORT += ["--noise-multiplier", "0.8", "--batch-size", "64", "--out"]


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tanager {tanager.__version__}\n"
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"tanager {tanager.__version__}\n"
    for words in (["--help"], ["help"]):
        assert main(words) == 0
        assert "plan" in capsys.readouterr().out
    assert main([]) == 2
    with pytest.raises(SystemExit):
        main(["help", "plan"])
    assert "Plan the privacy budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], ["train"]),
        (["train", "mnist-l"], ["mnist-lenet"]),
        (["train", "digits", "--learning-rate-"], ["--learning-rate-schedule"]),
        (["train", "digits", "--quie"], ["--quiet"]),
        (["help", "pred"], ["predict"]),
        (["plan", "mnist-l"], []),
    ],
    ids=" ".join,
)
def test_bash_completes_commands_recipes_and_flags(capsys, words, expected):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(["tanager", *words])
    script += f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _tanager\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().split() == expected
    assert not done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_given_the_same_words(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "evaluate" in script and "mnist-lenet" in script and "--epsilon" in script


@pytest.mark.parametrize(
    "words",
    ["train", "train folder", "search", "search folder", "search data", "audit"],
)
def test_help_is_short_and_all_of_it_is_there(capsys, words):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            main([*words.split(), flag])
        assert not stop.value.code
        shown[flag] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) < 60
    for name in ("--epsilon", "--list", "--help-all"):
        assert name in shown["--help"]
    assert "--clip-norm" not in shown["--help"] and "--clip-norm" in shown["--help-all"]


@pytest.mark.parametrize("words", ["search", "search budget", "audit"])
def test_help_of_a_flag_has_the_line_breaks_of_its_box_only(capsys, words):
    with pytest.raises(SystemExit):
        main([*words.split(), "--help-all"])
    shown = capsys.readouterr().out.splitlines()
    lines = [line[2:-2] for line in shown if line.startswith("│")]
    for line, after in itertools.pairwise(lines):
        text = line.startswith(" " * 8) and not line.rstrip().endswith((".", ")"))
        if text and after.startswith(" " * 8):
            assert len(f"{line.rstrip()} {after.split()[0]}") > len(line), (line, after)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean train?"),
        (["train", "cifar10-wrn-16"], "did you mean cifar10-wrn-16-4?"),
        (["train", "--batch-size", "5000"], "error: --batch-size (=5000) must be"),
        (["train", "--epsilon", "-1"], "error: --epsilon (=-1.0) must be positive"),
        (["train", "--delta", "2"], "delta (=2.0) must be"),
        (
            ["train", "folder"],
            "error: --data (=None) is needed for folder: a folder of",
        ),
        (
            ["train", "/tmp", "--epsilon=4"],
            "recipe (='/tmp') is a path, and not the name of a recipe: tanager train "
            "folder --data /tmp",
        ),
        (["train", "folder", "my images"], "write --data 'my images'"),
        (
            ["train", "--data", "/tmp", "mnist-lenet"],
            "recipe (='mnist-lenet') comes after a flag: name the recipe first: "
            "tanager train mnist-lenet",
        ),
        (["train", "--resume", "--out", "x"], "error: --resume (=True) names the last"),
        (
            ["train", "--epsilon", "4,5"],
            "--epsilon (='4,5') must be a number: write 4.5",
        ),
        (["account", "limit", "--epsilon=4,5"], "must be a number: write 4.5"),
        (["plan", "--examples", "50,000"], "must be a whole number: write 50000"),
        (["plan", "--epsilon", "1,500"], "a number: write 1500 or write 1.500"),
        (["train", "--steps", "3.5"], "--steps (='3.5') must be a whole number"),
        (["train", "--class-weights", "ill"], "a number for each class: such as"),
        (["train", "--class-weights", "ill", "x"], "must be a number after each name"),
        (
            ["train", "--class-weights", "balanced", "digits"],
            "(='balanced digits') must be balanced alone, or a name and a number",
        ),
        (
            ["train", "--class-weights", "1", "5", "1", "3"],
            "--class-weights (='1 5 1 3') names 1 twice: give it once",
        ),
        (
            ["train", "--optimizer-options", "momentum", ".5", "momentum", ".9"],
            "names momentum twice",
        ),
        (["bench", "throughput", "--strategies", "sgd", "sgd"], "names sgd twice"),
        (
            ["search", "--vary", "ema-decay=.5", "--vary=momentum"],
            "--vary (='momentum') is given again: give all after one --vary",
        ),
        (
            ["train", "--class-weights", "1", "5", "--class_weights=balanced"],
            "is given again: give all after one --class-weights",
        ),
        (["train", "--optimizer", "adamm"], "did you mean adam?"),
        (["train", "--optimizer", "a batch_size b"], "(='a batch_size b') must be"),
        (["train", "--physical-batch-size", "9999999999"], "must be at most 1048576"),
        (["train", "--model", "wrn-16-5x"], "model (='wrn-16-5x')"),
        (
            ["train", "cifar10-wrn-16-4", "--data", "/nowhere"],
            "error: --data (='/nowhere') does not exist",
        ),
        (
            [*PLAN, "--steps=5", "--epsilon=-1"],
            "error: --epsilon (=-1.0) must be positive",
        ),
        (
            [*PLAN, "--steps=9", "--epsilon=1e-9", "--delta=1e-30"],
            "any value of --noise-multiplier spends: --noise-multiplier = 1e+08",
        ),
        (
            ["train", "--features-from", "x", "--augmentation-multiplicity", "3"],
            "or give model linear and --fine-tune last-layer",
        ),
        (
            ["train", "--lerning-rate", "3"],
            "flag (='--lerning-rate') is unknown: did you mean --learning-rate? "
            "`tanager train digits --help-all` explains every flag",
        ),
        (["train", "--no-flp"], "did you mean --no-flip? "),
        (["train", "--solve-for", "x"], "flag (='--solve-for') is unknown: "),
        (["plan", "--exmples=3"], "did you mean --examples? `tanager plan --help`"),
        (["runs", "a", "b"], "(='b') belongs to no flag: `tanager runs --help` expl"),
        (["bench", "stp"], "what to measure (='stp') is unknown: did you mean step?"),
        (["bench", "step", "--repeets", "4"], "did you mean --repeats? `tanager ben"),
        (
            ["bench", "throughput", "--plot", "x.png", "--beside", "none.json"],
            "error: --beside (='none.json') cannot be read as JSON",
        ),
        (
            ["recipe", "digits", "--examples", "100"],
            "error: --examples (=100) must be at least the recipe's batch size, 512: "
            "give more, or a smaller --batch-size to tanager train",
        ),
        (["bench", "step", "--repeats=0"], "error: --repeats (=0) must be at least"),
    ],
)
def test_bad_input_gives_one_message(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--implementation tan", "(='tan') must be left out for small-cnn"),
        ("--model lenet", "image_height (=8) must be at least 16"),
        ("--weights /nowhere", "(='/nowhere') is not a file: give a .safetensors"),
        ("--preprocessing /nowhere", "cannot be read as JSON (No such file"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused_before_a_run_is_named(
    capsys, tmp_path, monkeypatch, words, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *words.split()]) == 2
    printed, error = capsys.readouterr()
    assert message in error and not printed


def test_names_in_a_folder_are_no_flags(tmp_path, capsys):
    for name in ("train_examples", "validation_examples"):
        (tmp_path / name).mkdir()
    assert main(["train", "folder", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tanager: error: --data (=")
    assert "2 folders (train_examples, validation_examples)" in error


def test_images_of_a_person_are_limited_only_where_persons_are_the_unit(capsys):
    assert main(["train", "digits", "--examples-per-group", "2"]) == 2
    told = (
        "--examples-per-group (=2) needs --unit group, which protects persons: add it"
    )
    assert told in capsys.readouterr().err


def test_help_names_every_other_search(capsys):
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    printed = capsys.readouterr().out
    for word in (*experiments.TABLES, "worker", "norms"):
        assert f"  tanager search {word} " in printed


def test_what_is_printed_of_a_file_steers_no_terminal(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"\\u001b[2J\\u202e": 1')
    save_file({"\x1b[31mred\nred": np.zeros(1)}, tmp_path / "m.safetensors")
    for words in (
        ["export", str(tmp_path), "--to", str(tmp_path / "\x1b[2J")],
        [*SHORT, str(tmp_path / "run"), "--weights", str(tmp_path / "m.safetensors")],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("tanager: error: ")
        assert error.replace("\n", "").isprintable()


def test_recipes_are_listed(capsys):
    assert main(["train", "--list"]) == 0
    printed = capsys.readouterr().out
    for name in ("digits", "cifar10-wrn-16-4", "cifar10-wrn-40-4", "folder"):
        assert name in printed
    assert "79.5" in printed
    assert main(["train", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert [each["name"] for each in listed] == [*recipes.RECIPES]


def test_ctrl_c_that_is_swallowed_at_the_start_stops_before_the_first_step(
    tmp_path, monkeypatch, capsys
):
    prepare, handler = runner.prepare, signal.default_int_handler

    def swallow(*arguments, **options):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return prepare(*arguments, **options)

    monkeypatch.setattr(runner, "prepare", swallow)
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert main([*SHORT, str(tmp_path / "run")]) == 130
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    stopped = f"stopped: run the same command again to resume {tmp_path / 'run'}\n"
    assert stopped in capsys.readouterr().err
    assert (tmp_path / "run/ledger.jsonl").read_text() == ""


@pytest.mark.parametrize("begun", [True, False])
def test_a_stopped_run_in_a_new_folder_names_it(tmp_path, monkeypatch, capsys, begun):
    def stop(placed, **options):
        if begun:
            Path(placed.recipe.out, "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", stop)
    assert main(SHORT[:-1]) == 130
    named = " with --out runs/digits-1 to resume" if begun else ""
    told = capsys.readouterr().err
    assert told == f"tanager: stopped: run the same command again{named}\n"
    if not begun:
        assert main([*SHORT, "new"]) == 130
        assert capsys.readouterr().err == told and not Path("new").exists()


def test_a_path_with_the_signs_of_a_markup_is_a_path(tmp_path, capsys):
    out = tmp_path / "[/b] x"
    assert main([*SHORT, str(out)]) == 0
    printed = capsys.readouterr().out
    assert "[/b] x/report.html" in printed.replace("\n", "")
    assert f"tensorboard --logdir '{out}/tensorboard'" in printed
    assert "nothing is trained" not in printed
    assert main([*SHORT, str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"run: {out} (finished before: nothing is trained;" in printed


def test_a_folder_of_another_run_is_refused_before_anything_is_computed(
    tmp_path, capsys, monkeypatch
):
    out, other = tmp_path / "run", tmp_path / "exported"
    assert main([*SHORT, str(out)]) == 0
    other.mkdir()
    (other / "config.json").write_text('{"tanager": {}}')
    capsys.readouterr()
    monkeypatch.setattr(runner.tasks, "make", None)
    for folder, words, message in (
        (out, ["--steps", "3"], "recipe.steps was 2 and is 3"),
        (out, ["--seed", "3"], "differs from the seed of this run folder"),
        (other, [], "holds an exported model, not a run"),
    ):
        assert main([*SHORT, str(folder), *words]) == 2
        printed, error = capsys.readouterr()
        assert message in error and "run:" not in printed


def test_a_run_begun_with_a_flag_that_is_refused_now_is_repeated(
    tmp_path, capsys, monkeypatch
):
    run = tmp_path / "run"
    words = [*SHORT, str(run), "--unreadable", "skip", "--workers", "2"]
    words += ["--stream", "False", "--lora-rank", "4"]
    assert main(words) == 2
    assert "--lora-rank (=4) needs --fine-tune lora" in capsys.readouterr().err
    with monkeypatch.context() as older:
        older.setattr(flags, "_refuse_alone", lambda *_: None)
        older.setattr(runner, "_refuse_unused", lambda *_: None)
        assert main(words) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert "finished before: nothing is trained" in capsys.readouterr().out
    (run / "result.json").unlink()
    assert main(words) == 0
    assert (run / "result.json").exists()
    assert main(["evaluate", str(run)]) == 0


def test_json_is_one_object_and_quiet_nothing(tmp_path, capsys):
    out = str(tmp_path / "run")
    assert main([*SHORT, out, "--json", "--fast"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(found) == [
        *("run", "epsilon", "delta", "private", "test_accuracy", "test_accuracy_ema"),
        *("seconds", "report"),
    ]
    assert found["run"] == out and found["report"] == f"{out}/report.html"
    assert 0 < found["epsilon"] < 8
    assert main([*SHORT, out, "--quiet"]) == 0  # it is complete
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "terminal", "answer", "begins"),
    [
        (3599.0, True, None, True),
        (3601.0, False, None, True),
        (3601.0, True, "y", True),
        (3601.0, True, "", False),
        (3601.0, True, "no", False),
    ],
)
def test_a_person_is_asked_before_a_long_run(
    monkeypatch, seconds, terminal, answer, begins
):
    asked = []

    def ask(question):
        asked.append(question)
        return answer

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))
    estimate = Estimate(1, seconds, 0, 0.0, 10**9)
    with contextlib.nullcontext() if begins else pytest.raises(KeyboardInterrupt):
        train._ask(estimate)
    assert asked == ([] if answer is None else ["go on? [y/N] "])


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nmore"),
        jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR: out of memory"),
        MemoryError(),
    ],
)
def test_too_little_memory_is_one_message(monkeypatch, capsys, error):
    def run(words):
        raise error

    monkeypatch.setattr(plan, "run", run)
    assert main(["plan"]) == 1
    told = capsys.readouterr().err
    assert "give a lower --physical-batch-size" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(("balanced", "said"), [(0.8, False), (0.5, True)])
def test_a_run_that_finds_only_the_common_classes_says_so(balanced, said):
    values = {"accuracy": 0.84, "balanced_accuracy": balanced}
    average = {name: {"value": value} for name, value in values.items()}
    summary = {"private": True, "measures": {"average": average}}
    summary |= {"test_accuracy": 0.8, "test_accuracy_ema": 0.84}
    result: Any = SimpleNamespace(epsilon=3.0, delta=1e-5, summary=summary)
    text = train._conclusion(result, True)
    assert "test accuracy 80.00 %, average of parameters 84.00 %" in text
    assert text.endswith("; balanced accuracy only 50.00 % (see the report)") == said
