"""A run traces its step once: what checks the loss is what the first batch compiles."""

import numpy as np
import pytest
from small_runs import run
from test_feed import Rows

from tanager.adaptive import AdaptiveClipping
from tanager.clipping.planning.autotune import Timings
from tanager.privacy.mechanism import Mechanism
from tanager.training import loop
from tanager.training.step import Step


def data(held):
    """Examples of float64, which the device has as float32."""
    rows = Rows()
    rows.arrays["x"] = rows.arrays["x"].astype(np.float64)
    return rows.arrays if held else rows


@pytest.fixture
def traces(monkeypatch):
    """The steps whose `_accumulate` was traced, one entry each time."""
    found = []
    accumulate = Step._accumulate

    def counted(step, params, *rest):
        found.append(step)
        return accumulate(step, params, *rest)

    monkeypatch.setattr(Step, "_accumulate", counted)
    monkeypatch.setattr(loop, "Step", Step)
    return found


@pytest.mark.parametrize(
    ("held", "options"),
    [
        (True, {"devices": 1, "adaptive": AdaptiveClipping()}),
        (
            False,
            {
                "devices": 2,
                "strategy": "auto",
                "memory": "low",
                "shard_parameters": True,
                "augment": lambda key, example: example,
                "augmentation_multiplicity": 2,
            },
        ),
    ],
    ids=["adaptive, per_example", "low, sharded, views"],
)
def test_the_step_is_traced_once(traces, held, options):
    short = {"mechanism": Mechanism(0.4, 1.2, 2), "evaluate": None}
    run(data=data(held), **short, **options)
    assert len(traces) == 1


def test_what_was_measured_is_traced_anew(traces, monkeypatch):
    before = []

    def measure(*arguments):
        before.append(len(traces))
        return True

    monkeypatch.setattr(Timings, "measure", measure)
    short = {"mechanism": Mechanism(0.4, 1.2, 2), "evaluate": None}
    run(devices=1, strategy="auto", **short)
    assert before == [1]  # after the loss was found fit
    assert len(traces) == 2
