"""What tilting cannot see counts as lost, in both directions."""

import math

import numpy as np
import pytest
from dp_accounting.pld.pld_pmf import DensePLDPmf

from tanager.privacy import _pld, _tilted
from tanager.privacy.mechanism import Adjacency


ADD = Adjacency.ADD_OR_REMOVE_ONE
PART = _pld.Part(0.1, 1.0, 2)
LOSSES = np.array([0.5, 1.0, 2.0])


@pytest.mark.parametrize("order", [1, -1])
def test_the_worse_direction_counts_and_is_read_off_upwards(order, monkeypatch):
    for worse in ([0.5, 0.3, 0.1], [0.9, 0.9, 0.9]):
        for ask, epsilon in ((_tilted.delta, 1.5), (_tilted.delta, 0.1)):
            tails = iter([np.array(worse), np.array([0.2, 0.05, 0.0])][::order])
            monkeypatch.setattr(_tilted, "_tail", lambda *_: (LOSSES, next(tails)))  # noqa: B023
            expected = worse[1] if epsilon > 1 else 1.0
            assert ask([PART], ADD, epsilon) == expected
        tails = iter([np.array(worse), np.array([0.2, 0.05, 0.0])][::order])
        expected = 2.0 if worse[2] < 0.2 else math.inf
        assert _tilted.epsilon([PART], ADD, 0.2, 1.0) == expected


@pytest.mark.parametrize("tilt", [1.0, 1e6, 1.3e6, 1.7e6])
@pytest.mark.parametrize("infinite", [0.0, 1e-6])
def test_what_composition_can_hide_is_in_every_delta(infinite, tilt):
    """At the largest loss: the infinite, and what rounding takes from the rest."""
    share, count = 0.5 - infinite, 3
    pmf = DensePLDPmf(0.5, -1, np.array([0.5, 0.0, share]), infinite, True)
    losses, deltas = _tilted._tail([(pmf, count)], tilt)
    assert losses[-1] == 1.5
    # All steps' E[e^{tl}] over e^{tl} of that loss.
    scale = (share + 0.5 * math.exp(-tilt)) ** count
    hidden = (_pld._CUT_COMPOSED + count * _pld.LOST) * scale
    assert deltas[-1] >= 0.99999 * count * infinite + hidden
