"""The end of a job: its result, and what is deleted."""

import shutil

import pytest

from tanager.search import jobs
from tanager.search.jobs import Job, Outcome


def test_a_killed_simulation_is_complete_once_its_model_is_deleted(
    tmp_path, target, monkeypatch
):
    job, found = Job(tmp_path, target.simulated(16), "digits"), Outcome(0.5, 1.0, 2.0)
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
