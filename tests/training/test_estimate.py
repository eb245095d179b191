"""What a run will take is said before anything is charged, and tells of no example."""

import numpy as np
import pytest
from scipy.stats import binom
from test_loop import run

from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training import estimate
from tanager.training.estimate import Estimate


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
