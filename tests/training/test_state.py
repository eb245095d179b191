"""What is counted of a physical batch: each example once, padding never."""

import jax.numpy as jnp
import numpy as np

from tanager.training.state import count


def test_examples_are_counted_once_and_padding_never():
    rows = [
        (0.5, 1.0, True),
        (2.0, 10.0, True),  # clipped
        (1.0, np.nan, True),
        (np.inf, 100.0, True),  # dropped, as is the next
        (np.nan, 100.0, True),
        (3.0, 1000.0, False),
        (np.nan, 1000.0, False),
    ]
    norms, losses, mask = map(jnp.array, zip(*rows, strict=True))
    found = count(norms, losses, mask, 1.0)
    assert (found.examples, found.clipped, found.dropped) == (5, 1, 2)
    assert found.losses == 11
    assert jnp.sum(found.norms) == 3
