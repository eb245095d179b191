"""What the tests of scans share, whether steps share parameters or take slices."""

import numpy as np
from oracle import alone, norms_of

from tanager.clipping.analysis.scans import Stacking


def name_of(loss):
    inner = getattr(loss, "func", loss)
    return "-".join([inner.__name__, *getattr(loss, "keywords", {})])


def assert_bounded(loss, params, x):
    """Examples of three sizes alone move the sum by the clipping norm at most."""
    x = x * 10.0 ** np.arange(-2, 1, dtype=np.float32)[:, None, None]
    exact = norms_of(loss, params, x)
    for sizes, norms in alone(loss, params, x, 0.5).values():
        assert np.max(sizes) <= 0.5 * 1.001
        np.testing.assert_allclose(norms, exact, rtol=1e-3)


def count_only_the_last_step(monkeypatch):
    whole = Stacking.stack

    def last(self, values):
        return whole(self, values.at[:-1].set(0) if values.ndim else values)

    monkeypatch.setattr(Stacking, "stack", last)
