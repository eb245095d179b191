"""What runs share: compiled programs in a file, and the folders of a few runs.

Across processes nothing is shared: `test_killed_for_real_it_goes_on_bit_identically`.
"""

import dataclasses

import jax
import numpy as np
import pytest
from small_runs import die, in_place_of, run

from switch import FULL
from tanager.training import loop
from tanager.training.step import Step


STEPS = {}


def remembered(problem, algorithm, runtime, seed, *places):
    """A step, compiled by an earlier run of the same settings if there was one."""
    examples, layout, held = places
    fields = dataclasses.fields(algorithm)
    settings = [getattr(algorithm, field.name) for field in fields]
    settings += [problem.loss, problem.augment, str(problem.trainable)]
    settings += [problem.finish, *dataclasses.astuple(runtime), examples, held]
    settings += [layout.count, layout.shard_parameters]
    if (groups := problem.groups) is not None:
        settings += [groups.examples_per_group, groups.numbers.tobytes()]
    for path, leaf in jax.tree_util.tree_leaves_with_path(problem.params):
        array = np.asarray(leaf)
        settings += [str(path), str(array.dtype), array.shape, array.tobytes()]
    try:
        known = STEPS.get(tuple(settings))
    except TypeError:  # a setting that has no hash
        return Step(problem, algorithm, runtime, seed, *places)
    if known is None:
        known = Step(problem, algorithm, runtime, seed, *places)
        STEPS[tuple(settings)] = known
    return known.with_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def _runs_share_programs():
    with pytest.MonkeyPatch.context() as patch:
        if not FULL:
            patch.setattr(loop, "Step", remembered)
        yield
    STEPS.clear()


FOLDERS = {}


def made_once(folders, name, make):
    """Return what `make` returned and its folder, for all files of a process."""
    if name not in FOLDERS:
        out = folders.mktemp(name) / "run"
        FOLDERS[name] = make(out), out
    return FOLDERS[name]


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A complete run of seed 5: what it returned, and its folder, not to be changed."""
    return made_once(tmp_path_factory, "seeded", lambda out: run(out, seed=5))


@pytest.fixture(scope="module")
def first_complete(tmp_path_factory):
    return made_once(tmp_path_factory, "complete", run)


@pytest.fixture
def complete(first_complete, tmp_path):
    """The folder of a complete run of its own secret."""
    return in_place_of(first_complete[1], tmp_path / "run")


@pytest.fixture(scope="module")
def first_dead(tmp_path_factory):
    return made_once(tmp_path_factory, "dead", lambda out: die(out, 1))[1]


@pytest.fixture
def dead(first_dead, tmp_path):
    """The folder of a run that died at its first evaluation."""
    return in_place_of(first_dead, tmp_path / "run")
