"""The time that devices wait for data is counted, and no other."""

from types import SimpleNamespace

import pytest

from tanager.training import progress
from tanager.training.progress import Clock


class Running:
    """Stands for an accumulator that is ready, or is still computed."""

    def __init__(self, ready):
        self.counts = SimpleNamespace(examples=self)
        self.is_ready = lambda: ready


@pytest.mark.parametrize(
    ("ready", "share"), [(True, 0.5), (False, 0.25)], ids=["idle", "busy"]
)
def test_devices_wait_only_where_they_have_nothing_to_compute(
    monkeypatch, ready, share
):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def batches():
        for _ in range(2):
            now[0] += 1  # to read a batch
            yield "batch"

    clock = Clock([])
    for _ in range(2):
        for _ in clock.waiting(batches()):
            clock.running(Running(ready))  # pyrefly: ignore[bad-argument-type]
        now[0] += 2  # to finish computing
        clock.tick()
    # Of four seconds between the two ticks: both batches, or the first of the step.
    assert clock.wait_fraction() == pytest.approx(share)


def test_where_nothing_is_shown_no_display_is_asked_for(monkeypatch):
    monkeypatch.setattr(progress, "new_console", None)
    with progress.measuring(False) as report:
        report("a method")
