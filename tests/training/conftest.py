"""What runs of one file share: to compile takes most of their time.

Across processes nothing is shared: `test_killed_for_real_it_goes_on_bit_identically`.
"""

import dataclasses

import jax
import numpy as np
import pytest

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
