"""What is expected to be fastest, where nothing is measured."""

import jax.numpy as jnp
import pytest
from jax import lax
from oracle import read

from tanager.clipping.planning import autotune, cost


def convolution(side, into, out, kernel, groups, stride, rows):
    def loss(w, x):
        layout = ("NHWC", "HWIO", "NHWC")
        options = {"dimension_numbers": layout, "feature_group_count": groups}
        y = lax.conv_general_dilated(x[None], w, (stride, stride), "SAME", **options)
        return jnp.sum(y**2)

    w = jnp.ones((kernel, kernel, into // groups, out))
    return read(loss, w, jnp.ones((rows, side, side, into)))[1][0]


# Fastest in `benchmarks/costs.py`, and how many times as long `vmap` takes there.
MEASURED = [
    ((8, 48, 48, 7, 48, 1, 8), "crossed", 84),
    ((16, 96, 96, 3, 96, 1, 8), "crossed", 12),
    ((16, 96, 96, 3, 96, 2, 8), "patches", 33),
    ((8, 32, 64, 3, 32, 1, 4), "crossed", 440),
    ((8, 32, 32, 3, 8, 1, 4), "crossed", 240),
    ((16, 64, 64, 3, 1, 1, 16), "crossed", 4.8),
]


@pytest.mark.parametrize(("shape", "fastest", "times"), MEASURED)
def test_the_fastest_way_is_expected_and_vmap_not_tried(shape, fastest, times):
    group, rows = convolution(*shape), shape[-1]
    seconds = {
        name: cost.estimate(group, cost.Method(name, cost.RETAINED), rows).seconds
        for name in group.gradients()
    }
    assert min(seconds, key=lambda name: seconds[name]) == fastest
    assert times / 5 < seconds["vmap"] / seconds[fastest] < 5 * times
    assert "retained:vmap" not in autotune._worth_trying(group, rows)
