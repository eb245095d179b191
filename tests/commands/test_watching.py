"""What a search says while it works."""

import io

from rich.console import Console

from tanager import recipes
from tanager.commands.watching import Watching, work_through
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def said(console):
    return console.file.getvalue().splitlines()


def test_each_run_says_the_best_so_far_and_how_many_are_left():
    screen = console()
    shown = Watching(4, [], screen)
    with shown.bar:
        for done, accuracy in enumerate((0.5, 0.7, 0.6, None), 1):
            shown.ended(done, accuracy, f"run {done}")
    assert said(screen) == [
        "run 1; best 50.00 %; 3 to go",
        "run 2; best 70.00 %; 2 to go",
        "run 3; best 70.00 %; 1 to go",
        "run 4; best 70.00 %",
    ]


def test_a_diverged_run_is_not_the_best():
    screen = console()
    Watching(2, [], screen).ended(1, None, "run 1")
    assert said(screen) == ["run 1; 1 to go"]


def test_a_terminal_shows_the_step_of_the_run():
    screen = console(terminal=True)
    shown = Watching(2, [], screen)
    with shown.bar:
        shown.line("trial 0", {"step": 25, "test_accuracy_ema": 0.25}, 100)
    assert "trial 0: step 25/100, 25.0 %" in screen.file.getvalue()  # pyrefly: ignore[missing-attribute]


def test_runs_made_before_are_not_shown_again(tmp_path, monkeypatch):
    every = [
        Job(tmp_path / str(number), recipes.get("digits").recipe, "digits", tmp_path)
        for number in range(2)
    ]

    def make(job, watch=None):
        found = Outcome(0.5 - int(job.folder.name) / 4, 1.0, 1.0)
        job.folder.mkdir(exist_ok=True)
        jobs.write_json(job.folder / "outcome.json", found._asdict())
        return found

    make(every[0])
    monkeypatch.setattr(jobs, "make", make)
    screen = console()
    outcomes = work_through(every, screen, lambda job: f"run {job.folder.name}")
    assert [found.accuracy for found in outcomes] == [0.5, 0.25]
    assert said(screen) == ["run 1: 25.00 %; best 50.00 %"]
