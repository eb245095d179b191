"""A study in its folder: killed, joined, put together again, and what it refuses."""

import dataclasses
import json
import shutil
import time
from itertools import product
from pathlib import Path

import pytest

from forks import Fork
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome
from tanager.search.settings import Settings
from tanager.search.simulation import plan_simulation
from tanager.search.space import Space
from tanager.search.study import Study


class Fake:
    """Stands for training: a run's accuracy is a function of its learning rate."""

    def __init__(self, dies_after=None):
        self.made, self.dies_after = [], dies_after

    def __call__(self, job, watch=None):
        if self.dies_after is not None and len(self.made) >= self.dies_after:
            raise KeyboardInterrupt
        if (done := jobs.outcome(job.folder)) is not None:
            return done
        self.made.append(job)
        rate = job.recipe.learning_rate
        job.folder.mkdir(parents=True, exist_ok=True)
        steps, every = job.recipe.steps, job.recipe.evaluate_every
        for step in range(every, steps + 1, every):
            line = {"step": step, "seconds": 0.1 * step}
            if watch is not None:
                watch(line | {"test_accuracy_ema": rate * step / steps / 2})
        found = Outcome(rate / 2, 1e6, 2.0, diverged=rate > 2)
        (job.folder / "outcome.json").write_text(json.dumps(found._asdict()))
        return found


@pytest.fixture
def fake(monkeypatch):
    """No training: `fake.made` has the runs that would have been made."""
    fake = Fake()
    monkeypatch.setattr(jobs, "make", fake)
    monkeypatch.setattr(jobs, "flops_of", lambda recipe, dataset: recipe.batch_size)
    return fake


def test_a_study_makes_its_trials_at_the_smallest_batch(tmp_path, settings, fake):
    study = Study(tmp_path / "study", settings)
    seen = []
    study.work(6, seen.append)
    assert [each.number for each in seen] == [0, 1, 2, 3, 4, 5]
    assert len(fake.made) == 6
    for job in fake.made:
        assert job.recipe.batch_size == 16
        assert job.recipe.noise_multiplier == pytest.approx(4.0 * 16 / 512)
        assert job.recipe.validation_examples == 140
        assert job.recipe.steps == 12
    best = study.best()
    assert best is not None and best.values["learning_rate"] == 1.0
    assert (best.state, best.steps, best.flops) == ("complete", 12, 12 * 16)
    study.work(6)
    assert len(fake.made) == 6
    assert (tmp_path / "study").stat().st_mode & 0o777 == 0o700


def test_killed_again_and_again_a_study_ends_with_all_its_trials(
    tmp_path, settings, monkeypatch
):
    numbers = []
    for survives in (0, 1, 0, 2, 1):
        monkeypatch.setattr(jobs, "make", Fake(dies_after=survives))
        with pytest.raises(KeyboardInterrupt):
            Study(tmp_path / "study", settings).work(
                6, lambda done: numbers.append(done.number)
            )
    monkeypatch.setattr(jobs, "make", Fake())
    Study(tmp_path / "study", settings).work(6, lambda d: numbers.append(d.number))
    assert numbers == [0, 1, 2, 3, 4, 5]
    results = Study(tmp_path / "study").results()
    assert [each.number for each in results] == [0, 1, 2, 3, 4, 5]


def test_a_trial_that_was_killed_before_it_chose_is_chosen_for(
    tmp_path, settings, fake
):
    study = Study(tmp_path / "study", settings)
    (tmp_path / "study/trials/0000").mkdir(parents=True)
    (tmp_path / "study/trials/0000/trial.lock").touch()
    study.work(2)
    assert [each.number for each in study.results()] == [0, 1]


def test_a_deleted_trial_is_run_again_with_the_same_choices(tmp_path, settings, fake):
    study = Study(tmp_path / "study", dataclasses.replace(settings, sampler="random"))
    study.work(3)
    before = study.results()
    shutil.rmtree(tmp_path / "study/trials/0001")
    study.work(3)
    assert study.results() == before
    assert len(fake.made) == 4


def test_a_trial_of_another_search_is_refused(tmp_path, settings, fake):
    study = Study(tmp_path / "study", settings)
    study.work(1)
    path = tmp_path / "study/trials/0000/trial.json"
    trial = json.loads(path.read_text())
    for values in ({"learning_rate": 3.0}, {"momentum": 0.5}):
        path.write_text(json.dumps(trial | {"values": values}))
        with pytest.raises(ValueError, match=r"another search .*: delete the folder"):
            study.work(2)


def test_a_trial_below_the_median_ends_early_and_a_diverged_one_is_worth_nothing(
    tmp_path, settings, fake
):
    rates = "learning-rate=0.01,0.5,0.6,0.7,0.8,0.9,1,4"
    changed = dataclasses.replace(
        settings, pruner="median", space=Space.parse([rates]), sampler="random"
    )
    study = Study(tmp_path / "study", changed)
    study.work(40)
    results = study.results()
    states = {each.state for each in results}
    assert states == {"complete", "pruned", "diverged"}
    for each in results:
        if each.state == "pruned":
            # A third of 12 steps are left alone.
            assert each.steps in (4, 8)
            assert each.number >= 5
        if each.values["learning_rate"] == 4.0:
            assert each.state == "diverged"
    best = study.best()
    assert best is not None and best.values["learning_rate"] == 1.0
    # Killed after a trial had ended, and before that was written down.
    fake.made.clear()
    for each in results:
        if each.state != "complete":
            (tmp_path / f"study/trials/{each.number:04d}/done.json").unlink()
    study.work(40)
    assert study.results() == results
    assert not fake.made


def test_halving_lets_the_best_quarter_go_on(tmp_path, settings, fake):
    recipe = dataclasses.replace(settings.target.recipe, steps=64)
    changed = dataclasses.replace(
        settings,
        target=plan_simulation("digits", recipe, settings.target.examples),
        pruner="halving",
        space=Space.parse(["learning-rate=0.1..1"]),
        sampler="random",
    )
    study = Study(tmp_path / "study", changed)
    study.work(40)
    results = study.results()
    assert {each.steps for each in results if each.state == "pruned"} == {4, 16}
    complete = [each for each in results if each.state == "complete"]
    best = study.best()
    rates = [each.values["learning_rate"] for each in results]
    assert best is not None and best.values["learning_rate"] == max(rates)
    assert len(complete) < 10
    # A third of what all of them would take; an eighth if they came all at once.
    assert sum(each.steps for each in results) < 40 * 64 / 3


def test_a_grid_is_gone_through_once(tmp_path, settings, fake):
    study = Study(tmp_path / "study", dataclasses.replace(settings, sampler="grid"))
    study.work(20)
    values = [each.values for each in study.results()]
    assert study.count(20) == 12
    tried = [(each["learning_rate"], each["ema_decay"]) for each in values]
    assert sorted(tried) == [*product((0.25, 0.4, 0.6, 1.0), (0.5, 0.9, 0.99))]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_no_choices_are_tried_twice(tmp_path, settings, fake, sampler):
    study = Study(tmp_path / "study", dataclasses.replace(settings, sampler=sampler))
    study.work(11)
    values = [tuple(each.values.items()) for each in study.results()]
    assert len({*values}) == len(values) == 11
    study.work(20)
    assert study.count(20) == len(study.results()) == len(fake.made) == 12


def test_no_trial_ends_early_in_its_last_tenth(tmp_path, settings, fake, monkeypatch):
    recipe = dataclasses.replace(settings.target.recipe, steps=40, evaluate_every=1)
    target = plan_simulation("digits", recipe, settings.target.examples)
    asked = []

    def is_worse(self, number, trial):
        asked.append(max(map(int, trial["accuracies"])))
        return asked[-1] > 36

    monkeypatch.setattr(Study, "_is_worse", is_worse)
    study = Study(tmp_path / "study", dataclasses.replace(settings, target=target))
    study.work(1)
    assert asked == [*range(1, 37)]
    assert [each.state for each in study.results()] == ["complete"]


def test_a_study_that_was_moved_goes_on_where_it_is(tmp_path, settings, fake):
    def settings_in(folder):
        recipe = dataclasses.replace(settings.target.recipe, out=str(folder))
        target = dataclasses.replace(settings.target, recipe=recipe)
        return dataclasses.replace(settings, target=target)

    one, two = tmp_path / "one", tmp_path / "two"
    Study(one, settings_in(one)).work(2)
    one.rename(two)
    Study(two, settings_in(two)).work(3)
    assert len(fake.made) == 3
    assert not one.exists()


def test_the_winner_runs_at_every_batch_size(tmp_path, settings, fake):
    twice = dataclasses.replace(settings, repeats=2)
    study = Study(tmp_path / "study", twice)
    winner = study.confirmations({"learning_rate": 0.25, "ema_decay": 0.9})
    assert [job.recipe.batch_size for job in winner] == [16, 16, 32, 32, 64, 64]
    assert len({job.folder for job in winner}) == 6
    # Repeats of one seed would be the same run, and show no variation.
    recipe = dataclasses.replace(settings.target.recipe, seed=5)
    target = dataclasses.replace(settings.target, recipe=recipe)
    study = Study(tmp_path / "seeded", dataclasses.replace(twice, target=target))
    winner = study.confirmations({"learning_rate": 0.25, "ema_decay": 0.9})
    assert [job.recipe.seed for job in winner] == [5, 6] * 3
    for job in winner:
        assert job.recipe.learning_rate == 0.25
        assert job.recipe.noise_multiplier is not None
        ratio = job.recipe.noise_multiplier / job.recipe.batch_size
        assert ratio == pytest.approx(4.0 / 512)


WORKER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tanager.search import jobs
from test_study import Fake
from tanager.search.study import Study

class Slow(Fake):
    def __call__(self, job, watch=None):
        time.sleep(0.3)
        return super().__call__(job, watch)

jobs.make, jobs.flops_of = Slow(), lambda recipe, dataset: 1.0
Study(sys.argv[2]).work(12, lambda done: print(done.number, flush=True))
"""


@pytest.mark.slow
def test_workers_share_the_trials_and_take_over_from_the_dead(tmp_path, settings):
    folder, script = tmp_path / "study", tmp_path / "worker.py"
    Study(folder, settings)
    script.write_text(WORKER)
    words = [Path(__file__).parent, folder]
    workers = [Fork(script, words) for _ in range(3)]
    while len(list(folder.glob("trials/*/done.json"))) < 3:
        assert workers[0].running
        time.sleep(0.01)
    workers[0].kill()
    for worker in workers:
        worker.wait()
    assert [worker.code for worker in workers] == [-9, 0, 0]
    results = Study(folder).results()
    assert [each.number for each in results] == list(range(12))
    said = [worker.out.split() for worker in workers]
    assert len(said[1]) + len(said[2]) >= 9
    assert len(said[1]) and len(said[2])
    assert len({*said[0], *said[1], *said[2]}) == sum(map(len, said))


def test_jobs_are_made_once_whoever_makes_them(tmp_path, target, fake):
    every = [
        Job(tmp_path / str(number), target.simulated(16), "digits", tmp_path / "shared")
        for number in range(3)
    ]
    with jobs.claimed(every[1].folder / "job.lock") as mine:
        assert mine
        with jobs.claimed(every[1].folder / "job.lock") as again:
            assert not again
    found = jobs.work(every)
    assert len(found) == 3
    assert jobs.work(every) == found
    assert len(fake.made) == 3


def test_a_study_of_other_settings_or_another_version_is_refused(tmp_path, settings):
    Study(tmp_path / "study", settings)
    for changes, message in (
        (
            {"batch_sizes": (16, 32)},
            r"batch_sizes was \[16, 32, 64\] and is \[16, 32\]",
        ),
        ({"space": Space.parse(["learning-rate=2"])}, "space was .* and is"),
    ):
        with pytest.raises(ValueError, match=f"cannot be resumed: {message}"):
            Study(tmp_path / "study", dataclasses.replace(settings, **changes))
    recipe = dataclasses.replace(settings.target.recipe, clip_norm=0.5)
    other = dataclasses.replace(settings.target, recipe=recipe)
    with pytest.raises(ValueError, match=r"clip_norm was 1\.0 and is 0\.5"):
        Study(tmp_path / "study", dataclasses.replace(settings, target=other))
    path = tmp_path / "study/study.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"tanager": "0.0.1"}))
    with pytest.raises(ValueError, match=r"was started by tanager 0\.0\.1"):
        Study(tmp_path / "study", settings)


def test_folders_of_other_things_are_refused(tmp_path, settings):
    (tmp_path / "photo.png").touch()
    with pytest.raises(ValueError, match="be empty or hold a study, but it holds"):
        Study(tmp_path, settings)
    with pytest.raises(ValueError, match=r"has no study\.json"):
        Study(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": ()}, "must have at least one"),
        ({"batch_sizes": (32, 16)}, "must be in rising order"),
        ({"batch_sizes": (0, 16)}, "^simulation_batch_sizes .*fewer than one example"),
        ({"batch_sizes": (16, 1024)}, "at most the target's batch size, 512"),
        ({"sampler": "grid", "space": Space.parse(["learning-rate=1..2"])}, "a range"),
        ({"sampler": "magic"}, "sampler .*must be one of tpe, random, grid"),
        ({"validation_examples": 0}, "validation_examples .*must be at least 1"),
    ],
)
def test_what_makes_no_study_is_refused(settings, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(settings, **changes)


def test_choices_are_tried_out_before_anything_runs(settings):
    dataset = jobs.load(settings.target.recipe)
    settings.check(dataset)
    for word, message in (
        ("model=small-cnn,resnet-9000", "model .*must be one of"),
        ("optimizer=sgd,magic", "optimizer .*must be one of"),
    ):
        bad = dataclasses.replace(settings, space=Space.parse([word]))
        with pytest.raises(ValueError, match=message):
            bad.check(dataset)


def test_trials_of_other_batches_and_lengths_have_the_same_budget(
    target, tmp_path, monkeypatch, fake
):
    monkeypatch.setattr(Study, "_is_worse", lambda *_: True)  # would end all of them
    space = Space.parse(["batch-size=256,512", "steps=6,24"])
    settings = Settings(
        target, space, (32,), validation_examples=140, repeats=1, sampler="grid", seed=5
    )
    study = Study(tmp_path / "study", settings)
    study.work(4)
    results = study.results()
    assert len(fake.made) == 4
    assert [each.state for each in results] == ["complete"] * 4
    for each in results:
        recipe = settings.simulated(32, each.values)
        whole = target.varied(space, each.values)
        factor = 32 / target.recipe.batch_size
        assert recipe.batch_size == round(each.values["batch_size"] * factor)
        assert recipe.steps == each.steps == each.values["steps"]
        assert whole.epsilon == pytest.approx(target.epsilon, rel=1e-3)
        assert recipe.noise_multiplier is not None
        noise = recipe.noise_multiplier / recipe.batch_size
        assert noise == whole.mechanism.noise_multiplier / whole.recipe.batch_size
