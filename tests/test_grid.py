"""Sums on a grid: whole numbers, exact in any order."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tanager.grid import Grid, Whole, checksum, halves


PARAMS = {"w": jnp.zeros((30, 7)), "b": jnp.zeros(3)}
GRID = Grid.of(0.5, PARAMS)


def whole(total):
    return jax.tree.map(
        lambda high, low: (np.asarray(high, np.int64) << 16) + np.asarray(low),
        total.high,
        total.low,
    )


def sums(number, scale=1.0):
    draw = np.random.default_rng(number)
    return jax.tree.map(
        lambda leaf: jnp.asarray(scale * draw.normal(size=leaf.shape), jnp.float32),
        PARAMS,
    )


def same(one, other):
    return all(
        jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), one, other))
    )


@pytest.mark.parametrize("coordinates", [1, 7, 10**6, 3 * 10**8])
@pytest.mark.parametrize("sensitivity", [1e-12, 0.3, 1.0, 1e12])
def test_rounding_costs_a_4096th_of_the_sensitivity_at_most(coordinates, sensitivity):
    like = jax.ShapeDtypeStruct((coordinates,), jnp.float32)
    grid = Grid.of(sensitivity, like)
    assert np.frexp(grid.spacing)[0] == 0.5  # a power of two
    assert 2**-13 * sensitivity < grid.rounding <= 2**-12 * sensitivity
    assert grid.coordinates == coordinates


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e3, 1e6])
def test_sums_are_rounded_to_the_nearest_whole_number(scale):
    given = sums(0, scale)
    found = whole(GRID.round(given))
    for name, leaf in given.items():
        exact = np.asarray(leaf, np.float64) / GRID.spacing
        assert np.abs(found[name] - exact).max() <= 0.5


def test_limbs_stay_in_their_range():
    total = GRID.zeros(PARAMS)
    for number in range(40):
        total = GRID.add(total, sums(number, 10.0 ** (number % 6)))
        for low in jax.tree.leaves(total.low):
            assert low.min() >= -(2**15) and low.max() < 2**15
            assert low.dtype == jnp.int32


def test_the_order_and_the_grouping_of_sums_do_not_matter():
    given = [sums(number, 10.0 ** (number % 5)) for number in range(30)]
    forward, backward = GRID.zeros(PARAMS), GRID.zeros(PARAMS)
    for each in given:
        forward = GRID.add(forward, each)
    for each in reversed(given):
        backward = GRID.add(backward, each)
    halved = [GRID.zeros(PARAMS), GRID.zeros(PARAMS)]
    for number, each in enumerate(given):
        halved[number % 2] = GRID.add(halved[number % 2], each)
    together = GRID.plus(*halved)
    expected = jax.tree.map(
        lambda *each: sum(each), *[whole(GRID.round(each)) for each in given]
    )
    for total in (forward, backward, together, jax.jit(GRID.plus)(*halved)):
        assert same(total, forward)
        assert same(whole(total), expected)


def test_a_sum_is_what_optax_takes():
    total = GRID.zeros(PARAMS)
    updates, _ = optax.identity().update(total, ())  # pyrefly looks at this line
    assert updates is total


def test_planted_sums_in_float32_depend_on_their_order():
    given = [sums(number, 10.0 ** (number % 5))["w"] for number in range(30)]
    assert not np.array_equal(sum(given[1:], given[0]), sum(given[-2::-1], given[-1]))


def test_floats_are_the_nearest_to_whole_numbers_of_spacings():
    total = GRID.add(GRID.zeros(PARAMS), sums(3, 100.0))
    found = GRID.floats(total, PARAMS)
    for name, leaf in whole(total).items():
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), leaf * GRID.spacing, rtol=2**-23
        )


def test_what_does_not_fit_is_cut_off_and_nothing_is_not_a_number():
    given = {"w": jnp.full((30, 7), 3e38), "b": jnp.array([jnp.nan, -jnp.inf, 0.0])}
    found = whole(GRID.round(given))
    assert np.all(found["w"] == 2**46)
    assert found["b"].tolist() == [0, -(2**46), 0]


def test_batches_that_could_not_be_added_are_refused():
    like = jax.ShapeDtypeStruct((10**9,), jnp.float32)
    grid = Grid.of(1.0, like)
    grid.require_room(2**17, 1.0)
    message = "must be at most 262,082 with 1,000,000,000 parameters: sums are added"
    with pytest.raises(ValueError, match=re.escape(message)):
        grid.require_room(2**18, 1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_sums_are_refused(dtype):
    with pytest.raises(ValueError, match="must be float32 or wider"):
        GRID.round(jax.tree.map(lambda leaf: leaf.astype(dtype), PARAMS))


def test_float64_sums_are_rounded_in_float64():
    with jax.enable_x64(True):
        params = {"a": jnp.zeros(3, jnp.float64)}
        grid = Grid.of(1.0, params)
        exact = np.array([1 / 3, 1e6 / 3, -1e3 / 7])
        found = grid.round({"a": jnp.asarray(exact)})
        np.testing.assert_array_equal(whole(found)["a"], np.rint(exact / grid.spacing))
        assert grid.floats(found, params)["a"].dtype == jnp.float64


def test_halves_are_the_number():
    draw = np.random.default_rng(0)
    numbers = draw.integers(-(2**46), 2**46, 1000)
    numbers[:6] = [0, -1, 2**15 - 1, 2**15, -(2**15), -(2**15) - 1]
    high, low = halves(numbers)
    np.testing.assert_array_equal((high.astype(np.int64) << 16) + low, numbers)
    assert low.min() >= -(2**15) and low.max() < 2**15


def test_a_checksum_tells_sums_apart():
    total = jax.tree.map(np.asarray, GRID.add(GRID.zeros(PARAMS), sums(1)))
    others = [total]
    for place in range(30):
        changed = total.low["w"].copy()
        changed[place, 2] += 1
        others.append(Whole(total.high, {**total.low, "w": changed}))
        others.append(jax.tree.map(lambda leaf, p=place: np.roll(leaf, p + 1), total))
    changed = total.low["w"].copy()
    changed[:7] = changed[:7].T
    others.append(Whole(total.high, {**total.low, "w": changed}))
    others.append(Whole(total.low, total.high))
    compiled = jax.jit(checksum)
    assert len({tuple(compiled(other).tolist()) for other in others}) == 63
