"""What a run will take is said before anything is charged, and tells of no example."""

import types

import numpy as np
import pytest
from scipy.stats import binom
from small_runs import EVALUATE, run

from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training import estimate, loop
from tanager.training.estimate import Estimate
from tanager.training.step import Step


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01, "1 second"),
        (89, "89 seconds"),
        (91, "2 minutes"),
        (720, "12 minutes"),
        (5400, "2 hours"),
        (1e5, "28 hours"),
        (1e6, "12 days"),
    ],
)
def test_durations_are_rounded_for_people(seconds, text):
    assert estimate.duration(seconds) == text


def test_the_sentence_says_what_is_counted():
    found = Estimate(600, 1.2, 20, 0.5, 1_500_000_000)
    assert found.seconds == 730
    assert found.sentence() == (
        "about 12 minutes: 600 updates of 1.2 s, 20 evaluations of 0.5 s; "
        "1.5 GB of memory"
    )
    assert "1 update of 2 s, 1 evaluation of" in Estimate(1, 2.0, 1, 0.5, 0).sentence()


@pytest.mark.parametrize(
    ("examples", "rate", "size"),
    [(1000, 0.1, 32), (1000, 0.1, 100), (1000, 1.0, 256), (50, 0.02, 64)],
)
def test_physical_batches_are_counted_as_they_will_be_drawn(examples, rate, size):
    sampler = PoissonSampler(Mechanism(rate, 1.0, 10), examples, Seed.from_int(0))
    drawn = np.arange(examples + 1)
    chances = binom.pmf(drawn, examples, rate)
    expected = np.sum(chances * np.maximum(1, np.ceil(drawn / size)))
    assert estimate.physical_batches(sampler, size) == pytest.approx(expected, rel=0.01)


def test_who_stops_at_the_estimate_has_spent_nothing(tmp_path):
    found = []

    def stop(estimated):
        found.append(estimated)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", on_estimate=stop)
    assert (tmp_path / "run/ledger.jsonl").read_text() == ""
    assert found[0].seconds > 0 and found[0].memory_bytes > 10**7


class Asked(Exception):
    """Ends a run at its estimate."""


def seconds_on_a_clock(monkeypatch, whole):
    """The estimate of a run and, if `whole`, what it took, on a clock that work moves.

    A physical batch takes 1 s and 10 s more the first time, the noise of an update
    0.5 s, and an evaluation of one model 4 s.
    """
    clock, estimated = [0.0], []

    def slow(function, seconds, first=0.0):
        waits = iter([first])

        def moving(*args, **options):
            clock[0] += seconds + next(waits, 0.0)
            return function(*args, **options)

        return moving

    now = types.SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr(estimate, "time", now)
    monkeypatch.setattr(Step, "accumulate", slow(Step.accumulate, 1.0, 10.0))
    monkeypatch.setattr(Step, "draw", slow(Step.draw, 0.5))

    def ask(found):
        estimated.append(found.seconds)
        clock[0] = 0.0
        if not whole:
            raise Asked

    try:
        run(evaluate=slow(EVALUATE, 4.0), on_estimate=ask, seed=0)
    except Asked:
        return estimated[0], None
    return estimated[0], clock[0]


@pytest.fixture(scope="module")
def took():
    with pytest.MonkeyPatch.context() as monkeypatch:
        estimated, seconds = seconds_on_a_clock(monkeypatch, whole=True)
    assert estimated == pytest.approx(seconds, rel=0.1)
    return seconds


def scaled(function, factor):
    return lambda *args: factor * function(*args)


PLANTED = {
    "a tenth of an update": (estimate, "time_update", scaled, 0.1),
    "a tenth of the updates": (
        loop,
        "Estimate",
        lambda made, share: lambda updates, *rest: made(int(share * updates), *rest),
        0.1,
    ),
    "one physical batch": (estimate, "physical_batches", lambda *_: lambda *_: 1, 0),
    "one model of two": (estimate, "time_evaluation", scaled, 0.5),
    "compilation": (
        estimate,
        "range",
        lambda *_: lambda *ends: [0] if ends == (2,) else range(*ends),
        0,
    ),
}


@pytest.mark.parametrize("name", [None, *PLANTED])
def test_a_wrong_estimate_is_caught(monkeypatch, took, name):
    if name is not None:
        module, attribute, wrong, by = PLANTED[name]
        right = getattr(module, attribute, None)
        monkeypatch.setattr(module, attribute, wrong(right, by), raising=False)
    estimated, _ = seconds_on_a_clock(monkeypatch, whole=False)
    assert (estimated == pytest.approx(took, rel=0.1)) == (name is None)
