"""What a search says while it works, by a clock of our own."""

import io

import pytest
from rich.console import Console

from tanager import recipes
from tanager.commands import watching
from tanager.commands.watching import Watching, work_through
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome


@pytest.fixture
def clock(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(watching.time, "monotonic", lambda: seconds[0])
    return seconds


def console(terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def said(console):
    return console.file.getvalue().splitlines()


def test_each_run_says_the_best_so_far_and_the_time_left(clock):
    screen = console()
    shown = Watching(4, 0, screen)
    with shown.showing():
        for done, (minute, accuracy) in enumerate(((10, 0.5), (30, 0.7), (60, 0.6)), 1):
            clock[0] = 60.0 * minute
            shown.ended(done, accuracy, f"run {done}")
        shown.ended(4, None, "run 4")
    assert said(screen) == [
        "run 1; best 50.00 %; 3 to go, about 30 min",
        "run 2; best 70.00 %; 2 to go, about 30 min",
        "run 3; best 70.00 %; 1 to go, about 20 min",
        "run 4; best 70.00 %",
    ]


def test_what_was_done_before_does_not_count_for_the_time_left(clock):
    screen = console()
    shown = Watching(10, 8, screen)
    clock[0] = 3600.0
    shown.ended(9, 0.5, "run 9")
    assert said(screen) == ["run 9; best 50.00 %; 1 to go, about 1 h 0 min"]


def test_a_diverged_run_is_not_the_best(clock):
    screen = console()
    Watching(2, 0, screen).ended(1, None, "run 1")
    assert said(screen)[0].startswith("run 1; 1 to go")


def test_a_terminal_shows_the_step_of_the_run(clock):
    screen = console(terminal=True)
    shown = Watching(2, 0, screen)
    with shown.showing():
        clock[0] = 60.0
        shown.line("trial 0", {"step": 25, "test_accuracy_ema": 0.25}, 100)
    # A quarter of the first of two: a minute is an eighth of the whole.
    assert "trial 0: step 25/100, 25.0 %" in screen.file.getvalue()  # pyright: ignore
    assert "about 7 min" in screen.file.getvalue()  # pyright: ignore


def test_runs_made_before_are_not_shown_again(tmp_path, clock, monkeypatch):
    every = [
        Job(tmp_path / str(number), recipes.get("digits").recipe, "digits")
        for number in range(2)
    ]

    def make(job, watch=None):
        found = Outcome(0.25, 0.25, None, 1.0, 1.0)
        job.folder.mkdir(exist_ok=True)
        jobs.write_json(job.folder / "outcome.json", found._asdict())
        return found

    make(every[0])
    monkeypatch.setattr(jobs, "make", make)
    screen = console()
    outcomes = work_through(every, screen, lambda job: f"run {job.folder.name}")
    assert [found.accuracy for found in outcomes] == [0.25, 0.25]
    assert said(screen) == ["run 1: 25.00 %; best 25.00 %"]
