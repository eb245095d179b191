"""A table of runs, and a page of several, from their public files."""

import datetime
import fcntl
import json
import re
import shutil
from unittest.mock import Mock

import pytest

from tanager.cli import main
from tanager.privacy.ledger import Ledger
from tanager.recipes import runner
from tanager.report import runs
from tanager.training.run_folder import RunFolder, numbered, remove_unused, unfinished


SECRET = ["--model", "linear", "--strategy", "bk", "--batch-size", "64"]
SECRET += ["--evaluate-every", "1", "--account", "none"]
WORDS = [*SECRET, "--seed", "1", "--noise-multiplier", "2"]
BY_RDP = ["--accountant", "rdp", "--noise-multiplier", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    for name, steps in (("one", "1"), ("two", "2")):
        words = ["train", "digits", *WORDS, "--steps", steps, "--out"]
        assert main([*words, str(made / name)]) == 0
    (made / "no-run").mkdir()
    return made


def test_runs_are_listed_with_what_they_reached(folder, capsys):
    assert main(["runs", str(folder), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run"] for row in listed] == [str(folder / n) for n in ("one", "two")]
    for row, steps in zip(listed, (1, 2), strict=True):
        result = json.loads((folder / row["run"] / "result.json").read_text())
        assert row["steps"] == steps and row["state"] == "finished"
        for name in ("epsilon", "delta", "test_accuracy", "test_accuracy_ema"):
            assert row[name] == result[name]
    assert main(["runs", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ε alone " in lines[0]
    assert len(lines) == 3 and "NOT PRIVATE" in lines[1]  # a fixed seed
    assert runs.find_runs(folder / "one") == [folder / "one"]


def test_runs_say_whom_their_epsilon_is_for(folder, tmp_path, capsys):
    """ε = 4 for each person is far more than ε = 4 for each image."""
    for name in ("one", "two"):
        shutil.copytree(folder / name, tmp_path / name)
    # What counts is what the run spent, not settings that were edited since.
    for name, file in (("one", "result.json"), ("two", "config.json")):
        content = json.loads((tmp_path / name / file).read_text())
        (tmp_path / name / file).write_text(json.dumps(content | {"unit": "person"}))
    assert main(["runs", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "for each" in head
    assert ["person" in lines[0], "example" in lines[1]] == [True, True]
    page = runs.write_comparison([tmp_path / n for n in ("one", "two")], tmp_path / "p")
    assert "unit of privacy" in page.read_text()


def test_a_copy_began_when_its_run_did(folder, tmp_path):
    for name in ("one", "two"):
        shutil.copytree(folder / name, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        began = {"one": "2026-03-02T10:00:00+00:00", "two": "2026-03-01T10:00:00+00:00"}
        changed = json.dumps(config | {"began": began[name]})
        (tmp_path / name / "config.json").write_text(changed)
    found = runs.find_runs(tmp_path)
    assert [each.name for each in found] == ["two", "one"]
    expected = datetime.datetime.fromisoformat(began["two"]).astimezone()
    assert runs.describe(found[0])["began"] == f"{expected:%Y-%m-%d %H:%M}"


def test_a_run_that_resumes_began_when_it_began(tmp_path):
    run, began = RunFolder(tmp_path / "run"), "2026-03-01T10:00:00+00:00"
    now = datetime.datetime.fromisoformat(str(run.began()))
    assert now.tzinfo is not None
    run.config.write_text(json.dumps({"began": began}))
    assert run.began() == began
    run.config.write_text("{}")  # of an older version
    assert run.began() is None


def test_a_run_without_a_result_is_stopped_or_running(folder, tmp_path):
    run = tmp_path / "half"
    run.mkdir()
    for name in ("config.json", "metrics.jsonl", "ledger.jsonl"):
        (run / name).write_bytes((folder / "one" / name).read_bytes())
    result = json.loads((folder / "one/result.json").read_text())
    found = runs.describe(run)
    assert found["state"] == "stopped" and found["epsilon"] == result["epsilon"]
    assert found["noise_multiplier"] is None
    with open(run / "ledger.jsonl", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert runs.describe(run)["state"] == "running"


def test_steps_after_the_last_evaluation_count(folder, tmp_path):
    run = tmp_path / "half"
    run.mkdir()
    for name in ("config.json", "metrics.jsonl", "ledger.jsonl"):
        (run / name).write_bytes((folder / "two" / name).read_bytes())
    first, last = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(first)
    assert runs.describe(run)["epsilon"] == json.loads(last)["epsilon"]
    assert json.loads(last)["epsilon"] > json.loads(first)["epsilon"]


@pytest.mark.parametrize(
    "words", [[*BY_RDP, "--class-weights", "balanced"], ["--non-private"]]
)
def test_a_stopped_run_says_what_it_will_say_at_its_end(tmp_path, words, capsys):
    run = tmp_path / "run"
    made = [*SECRET, "--steps", "1", *words]
    assert main(["train", "digits", *made, "--out", str(run)]) == 0
    finished, private = runs.describe(run), "--non-private" not in words
    assert finished["private"] == private
    (run / "result.json").unlink()
    stopped = runs.describe(run)
    for name in ("epsilon", "private"):
        assert stopped[name] == finished[name]
    capsys.readouterr()
    assert main(["runs", str(tmp_path)]) == 0
    assert ("NOT PRIVATE" not in capsys.readouterr().out) == private


def test_a_comparison_shows_what_differs_and_only_that(folder, tmp_path, capsys):
    page = tmp_path / "new" / "page.html"
    both = [str(folder / name) for name in ("one", "two")]
    assert main(["runs", "compare", *both, "--to", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = page.read_text()
    differing = re.search(r"Settings that differ.*?</section>", text, re.DOTALL)
    assert differing is not None
    names = re.findall(r"<th scope=row>(\w+)</th>", differing[0])
    assert names == ["steps"]
    assert "<td>1</td><td>2</td>" in differing[0]
    assert "ε alone" in text and "what was spent is the ε of all of them" in text
    assert text.count("no guarantee") == 2 and "ε spent" in text  # a fixed seed
    assert text.count("class=scroll") == 2 and "training time" in text
    assert text.count("<svg") == 1 and "http" not in text.replace("http-equiv", "")


def test_a_comparison_refuses_what_is_no_run_and_what_its_ledger_denies(
    folder, tmp_path, capsys
):
    for name, file, fields in (
        ("an exported model", "config.json", {"tanager": {}}),
        ("in result.json", "result.json", {"epsilon": 0.1}),
    ):
        run = shutil.copytree(folder / "one", tmp_path / file)
        content = json.loads((run / file).read_text())
        (run / file).write_text(json.dumps(content | fields))
        if name == "an exported model":
            (run / "ledger.jsonl").unlink()
            (run / "result.json").unlink()
        assert main(["runs", "compare", str(folder / "two"), str(run)]) == 2
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("fields", [{"steps": 1}, {"noise_multiplier": 9.0}, {}])
def test_a_listing_says_what_a_ledger_denies(folder, tmp_path, capsys, fields):
    run = shutil.copytree(folder / "two", tmp_path / "run")
    content = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(content | fields))
    assert main(["runs", str(tmp_path)]) == 0
    assert ("denied by its ledger" in capsys.readouterr().out) == bool(fields)


def test_a_damaged_run_is_named_and_the_others_listed(folder, tmp_path, capsys):
    for name, config in (("bad", "{"), ("good", None)):
        run = tmp_path / name
        run.mkdir()
        for file in ("config.json", "metrics.jsonl", "ledger.jsonl"):
            (run / file).write_bytes((folder / "one" / file).read_bytes())
        if config is not None:
            (run / "config.json").write_text(config)
    assert main(["runs", str(tmp_path), "--json"]) == 0
    printed = capsys.readouterr()
    assert [row["run"] for row in json.loads(printed.out)["runs"]] == [
        str(tmp_path / "good")
    ]
    assert "bad/config.json" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs", "nowhere"], "folder (='nowhere') is not a folder: name the folder"),
        (["runs", "compare", "one"], "runs (='one') must name two runs or more"),
        (["runs", "compare", "no-run", "one"], "is not the folder of a run: it has no"),
        (["runs", "compare", "one", "two", "--to", "."], "--to (='.') is a folder: "),
        (
            ["runs", "compare", "one", "two", "--to", "one/config.json/page.html"],
            "page's folder (='one/config.json') cannot be written: File exists",
        ),
        (["report", "no-run"], "run (='no-run') is not the folder of a run: it has no"),
    ],
    ids=" ".join,
)
def test_bad_input_is_refused(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_page_is_made_again(folder, capsys):
    page = folder / "one/report.html"
    before = page.read_text()
    page.unlink()
    assert main(["report", str(folder / "one")]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text() == before


def test_a_result_that_was_changed_gets_no_page(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "one", tmp_path / "run")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"epsilon": 0.5}))
    assert main(["report", str(run)]) == 2
    assert "claims epsilon = 0.5 in result.json, but" in capsys.readouterr().err


def test_each_run_gets_a_folder_of_its_own(tmp_path):
    for name in ("a-1", "a-9", "a-b", "a-1-2", "ab-12"):
        (tmp_path / name).mkdir()
    assert [numbered("a", tmp_path).name for _ in range(2)] == ["a-10", "a-11"]
    assert numbered("new", tmp_path / "deep").name == "new-1"
    with pytest.raises(ValueError, match=r"finds no unfinished a-… in .*--out instead"):
        unfinished("a", tmp_path)
    for number in (9, 10):
        (tmp_path / f"a-{number}/private").mkdir()
        (tmp_path / f"a-{number}/private/seed.json").touch()
    assert unfinished("a", tmp_path).name == "a-10"
    (tmp_path / "a-10/result.json").touch()
    assert unfinished("a", tmp_path).name == "a-9"
    with pytest.raises(ValueError, match=r"--out instead, such as .*/a-9$"):
        unfinished("b", tmp_path)


def test_a_refused_run_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", *WORDS, "--steps", "2"]
    odd = ["--devices", "2", "--physical-batch-size", "9999"]
    assert main([*words, *odd]) == 2  # after its seed
    assert "--physical-batch-size" in capsys.readouterr().err
    assert not [*(tmp_path / "runs").iterdir()]
    assert main([*words, *odd, "--out", "mine"]) == 2
    assert not (tmp_path / "mine").exists()
    (tmp_path / "runs/digits-1").mkdir()  # another run begins at the same time
    monkeypatch.setattr(runner, "RunFolder", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["digits-1"]


def test_of_two_that_begin_at_once_in_one_folder_one_is_refused(
    tmp_path, monkeypatch, capsys
):
    """The first has its seed and its ledger, and keeps both."""
    out, train = tmp_path / "new", runner.train

    def after_another(*given, **fields):
        with Ledger(out / "ledger.jsonl"):
            return train(*given, **fields)

    monkeypatch.setattr(runner, "train", after_another)
    assert main(["train", "digits", *WORDS, "--steps", "2", "--out", str(out)]) == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert (out / "private/seed.json").exists() and (out / "ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ({}, False),
        ({"private/seed.json": False}, False),
        ({"private/seed.json": True}, True),
        ({"private/seed.json": False, "config.json": None}, True),
        ({"private/sums.jsonl": None}, True),
        ({"notes.txt": None}, True),
    ],
)
def test_only_a_folder_that_a_run_never_used_is_removed(tmp_path, files, kept):
    run = tmp_path / "run"
    run.mkdir()
    for name, used in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        seed = {"secret": "00" * 32, "private": True, "used": used}
        (run / name).write_text("" if used is None else json.dumps(seed))
    remove_unused(run)
    assert run.exists() == kept


def test_resume_goes_on_with_the_last_unfinished_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", *WORDS, "--steps", "2"]
    assert main([*words, "--resume"]) == 2
    assert "finds no unfinished digits-… in runs" in capsys.readouterr().err
    assert main(words) == 0
    shutil.copytree(tmp_path / "runs/digits-1", tmp_path / "runs/digits-2")
    (tmp_path / "runs/digits-1/result.json").unlink()
    capsys.readouterr()
    assert main([*words, "--resume"]) == 0
    printed = capsys.readouterr().out
    assert "run: runs/digits-1 (stopped?" in printed
    assert (tmp_path / "runs/digits-1/result.json").exists()
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == [
        "digits-1",
        "digits-2",
    ]
