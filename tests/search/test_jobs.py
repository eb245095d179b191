"""The end of a job: its result, and what is deleted."""

import dataclasses
import shutil
from typing import Any

import pytest

from tanager import recipes
from tanager.recipes import tasks
from tanager.search import jobs
from tanager.search.jobs import Job, Outcome


def test_a_killed_simulation_is_complete_once_its_model_is_deleted(
    tmp_path, target, monkeypatch
):
    job, found = (
        Job(tmp_path, target.simulated(16), "digits", tmp_path / "shared"),
        Outcome(0.5, 1.0, 2.0),
    )
    for name in ("model.safetensors", "private/seed.json", "checkpoints/1/state"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", die)
        killed.setattr(jobs.Path, "unlink", die)
        with pytest.raises(KeyboardInterrupt):
            jobs.keep(tmp_path, found)
    assert jobs.outcome(tmp_path) is None
    assert jobs.work([job]) == [found]
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"outcome.json", "job.lock"}


def test_runs_share_the_features_of_frozen_layers(tmp_path, monkeypatch):
    """They are computed once, and deleted when the last run has ended."""
    fields: dict[str, Any] = {"model": "scattering-linear", "steps": 2}
    fields |= {"batch_size": 32, "validation_examples": 20, "evaluate_every": 2}
    fields |= {"train_examples": 60, "fine_tune": "last-layer"}
    fields |= {"noise_multiplier": 1.0, "epsilon": None, "solve_for": None, "seed": 0}
    recipe = dataclasses.replace(recipes.get("digits").recipe, **fields)
    first = Job(tmp_path / "run", recipe, "digits", tmp_path / "features")
    folders, cache = [], tasks.cache_features

    def cached(function, parameters, source, folder, **options):
        folders.append((folder, (folder / "features.json").exists()))
        return cache(function, parameters, source, folder, **options)

    monkeypatch.setattr(tasks, "cache_features", cached)
    jobs.work(jobs.repeats(first, 2))
    (train, new), (test, _), (again, known), _ = folders
    assert train == again != test
    assert [new, known] == [False, True]
    assert not (tmp_path / "features").exists()
    assert not [*(tmp_path / "run-0/private").rglob("features*")]
    other = dataclasses.replace(recipe, precision="bfloat16")
    shared = jobs.features_of(recipe, tmp_path)
    assert shared != jobs.features_of(other, tmp_path)
    faster = dataclasses.replace(recipe, learning_rate=3.0, out="elsewhere")
    assert shared == jobs.features_of(faster, tmp_path)
    given = dataclasses.replace(recipe, features="mine")
    assert jobs.features_of(given, tmp_path) == "mine"
    whole = dataclasses.replace(recipe, model="linear", fine_tune="all")
    assert jobs.features_of(whole, tmp_path) is None
