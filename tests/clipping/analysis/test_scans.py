"""Scans whose steps share parameters: one use with the positions of all steps.

Every structure is compared with `vmap(grad)`, in float64, by all strategies.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import cast, check, curve, draw, read
from scan_cases import assert_bounded, count_only_the_last_step, name_of

from cases import in_full
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.jaxprs import every_equation
from tanager.clipping.rules.groups import Joint, Single


ROWS, STEPS, SIZE = 3, 5, 4
PARAMS = {"u": (SIZE, SIZE), "w": (SIZE, 2), "b": (SIZE,), "h": (SIZE,)}


def cell(p, hidden, now):
    return jnp.tanh(p["u"] @ hidden + p["w"] @ now + p["b"])


def plain(p, x, **options):
    def step(hidden, now):
        hidden = cell(p, hidden, now)
        return hidden, hidden

    last, every = lax.scan(step, p["h"], x, **options)
    return curve(last) + 0.1 * curve(every)


def mapped(p, x):
    return curve(lax.map(lambda now: cell(p, p["h"], now), x))


def in_calls(p, x):
    @jax.checkpoint
    @jax.jit
    def step(hidden, now):
        return jax.jit(cell)(jax.tree.map(jnp.sin, p), hidden, now), None

    return curve(lax.scan(step, p["h"], x)[0])


def carried_as_it_is(p, x):
    def step(carry, now):
        p, hidden = carry
        return (p, cell(p, hidden, now)), None

    (_, last), _ = lax.scan(step, (p, jnp.zeros(SIZE, x.dtype)), x)
    return curve(last)


def carried_and_changed(p, x):
    def step(carry, now):
        u, hidden = carry
        hidden = jnp.tanh(u @ hidden + p["w"] @ now)
        return (0.5 * u.T, hidden), jnp.sum(hidden)

    (u, last), sums = lax.scan(step, (p["u"], p["h"]), x)
    return curve(u @ last) + curve(sums)


def nested(p, x):
    def outer(hidden, now):
        def inner(hidden, one):
            return jnp.tanh(p["u"] @ hidden + one * p["b"]), None

        return lax.scan(inner, hidden + p["w"] @ now, now)[0], None

    return curve(lax.scan(outer, p["h"], x)[0])


def times_a_number_of_the_step(p, x):
    def step(carry, now):
        count, hidden = carry
        own = p["u"] * count + p["b"][:, None]
        return (count + 1, jnp.tanh(own @ hidden + p["w"] @ now)), None

    return curve(lax.scan(step, (jnp.ones((), x.dtype), p["h"]), x)[0][1])


def within_and_outside(p, x):
    def step(hidden, now):
        return jnp.tanh(p["u"] @ hidden + p["w"] @ now), None

    last, _ = lax.scan(step, jnp.tanh(p["u"] @ jnp.ones(SIZE, x.dtype)), x)
    return curve(p["u"] @ last) + curve(p["u"].T @ last)


def two_scans(p, x):
    first = lax.scan(lambda h, now: (cell(p, h, now), None), p["h"], x)[0]
    again = lambda h, now: (cell(p, h, now) * h, None)  # noqa: E731
    return curve(lax.scan(again, first, x, reverse=True)[0])


def the_same_data_in_all_steps(p, x):
    def step(hidden, now):
        return jnp.tanh(
            p["u"] @ hidden + p["w"] @ x[0] + now[0] * (p["w"] @ x[1])
        ), None

    return curve(lax.scan(step, p["h"], x)[0])


def on_the_left_and_right(p, x):
    def step(hidden, now):
        both = p["u"] @ hidden + hidden @ p["u"]
        return jnp.tanh(
            both + jnp.outer(p["w"] @ now, jnp.ones(3, x.dtype))[:, 0]
        ), None

    return curve(lax.scan(step, p["h"], x)[0])


def in_a_branch(p, x):
    def step(hidden, now):
        step = functools.partial(cell, p)
        return lax.cond(
            now[0] > 0, step, lambda h, n: jnp.sin(p["u"] @ h), hidden, now
        ), None

    return curve(lax.scan(step, p["h"], x)[0])


def rows_of_a_table(p, x):
    def step(hidden, now):
        row = p["u"][jnp.int32(jnp.abs(now[0]) * 100) % SIZE]
        return jnp.tanh(row * hidden + p["w"] @ now), None

    return curve(lax.scan(step, p["h"], x)[0])


def flat_functions(p, x):
    def step(hidden, now):
        rounded = jnp.round(p["u"]) @ hidden + lax.stop_gradient(p["w"]) @ now
        return jnp.tanh(rounded + p["b"] * jnp.sign(hidden)), None

    return curve(lax.scan(step, p["h"], x)[0])


def convolved(p, x):
    def step(image, now):
        kernel = p["u"].reshape(2, 2, 2, 2)
        image = lax.conv_general_dilated(
            image * now[0],
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.tanh(image + jnp.broadcast_to(p["w"][0], image.shape)), None

    start = jnp.outer(p["h"], jnp.ones(SIZE, x.dtype)).reshape(2, 2, 2, 2)
    return curve(lax.scan(step, start, x)[0])


def bounded_loop(p, x):
    body = lambda n, h: cell(p, h, x[n])  # noqa: E731
    return curve(lax.fori_loop(0, STEPS, body, p["h"]))


def vectors_of_custom_derivatives(p, x):
    @jax.custom_jvp
    def scaled(w, y):
        return w * y

    @scaled.defjvp
    def _(primals, tangents):
        (w, y), (dw, dy) = primals, tangents
        return w * y, dw * y + 2 * w * dy

    def step(hidden, now):
        return jnp.tanh(scaled(p["b"], hidden) + p["w"] @ now), None

    return curve(lax.scan(step, p["h"], x)[0])


def parameters_come_out(p, x):
    def step(hidden, now):
        return cell(p, hidden, now), (p["b"], 2.0)

    last, (every, _) = lax.scan(step, p["h"], x)
    return curve(every * last[None])


def a_parameter_is_the_next_carry(p, x):
    def step(hidden, now):
        return p["h"], cell(p, hidden, now)

    last, every = lax.scan(step, jnp.ones(SIZE, x.dtype), x)
    return curve(last) + curve(every)


LOSSES = [
    *(parameters_come_out, a_parameter_is_the_next_carry, plain, in_calls),
    *(carried_as_it_is, carried_and_changed, nested, times_a_number_of_the_step),
    *(within_and_outside, two_scans, the_same_data_in_all_steps, in_a_branch),
    *(rows_of_a_table, flat_functions, convolved, vectors_of_custom_derivatives),
]
# As `two_scans` (whose second is backwards), `times_a_number_of_the_step` (which
# counts), `a_parameter_is_the_next_carry` (no step needs another's result), and
# `within_and_outside` (both sides).
MORE = [
    *(functools.partial(plain, reverse=True), functools.partial(plain, unroll=2)),
    *(bounded_loop, mapped, on_the_left_and_right),
]


def inputs(steps=STEPS):
    arrays = draw(3, *PARAMS.values(), (ROWS, steps, 2), scale=0.7)
    return dict(zip(PARAMS, arrays, strict=False)), arrays[-1]


@pytest.mark.parametrize("loss", in_full(LOSSES + MORE, *MORE), ids=name_of)
def test_what_is_clipped_is_the_gradient(loss):
    params, x = inputs()
    program, groups = read(loss, params, x)
    assert any(tap.all_steps for tap in program.taps)
    assert not any(tap.equation.primitive.name == "scan" for tap in program.taps)
    assert len(program.taps) < 12
    check(loss, params, x, methods=len(groups) < 6)


@pytest.mark.parametrize("steps", [0, 1, pytest.param(2, marks=pytest.mark.full), 65])
def test_scans_of_any_length(steps):
    params, x = inputs(steps)
    program, _ = read(plain, params, x)
    assert any(tap.all_steps for tap in program.taps) == (steps > 1)
    check(plain, params, x)


def test_the_steps_of_a_product_are_its_positions():
    params, x = inputs(65)
    groups = {group.leaves: group for group in read(plain, params, x)[1]}
    assert all(isinstance(group, Single) for group in groups.values())
    shown = {leaves: group.rule.describe() for leaves, group in groups.items()}
    names = dict(zip(sorted(PARAMS), shown.values(), strict=True))
    assert set(names) == set(PARAMS)
    dots = [rule for rule in names.values() if rule.startswith("dot_general")]
    assert len(dots) == 2
    assert all("[65," in rule for rule in dots)


def test_uses_outside_of_the_scan_are_positions_too():
    params, x = inputs()
    _, groups = read(within_and_outside, params, x)
    (joint,) = (group for group in groups if isinstance(group, Joint))
    assert sorted(rule.describe()[:3] for rule in joint.rules) == ["2 ×", "add", "dot"]


def test_the_size_of_a_program_does_not_grow_with_the_steps():
    def count(steps):
        params, x = inputs(steps)
        clip = clipped_grad(plain, clip_norm=1.0, strategy="bk")
        jaxpr = jax.make_jaxpr(clip)(params, x)
        return len(list(every_equation(jaxpr.eqns)))

    assert count(300) < 1.2 * count(4)  # sums in pairs take more levels


def test_a_row_that_is_not_finite_moves_no_other():
    params, x = cast(inputs(), "float32")
    clip = eqx.filter_jit(clipped_grad(convolved, clip_norm=0.5, strategy="bk"))
    kept = jax.tree.leaves(clip(params, x, jnp.array([True, False, True])).sum)
    for bad in (np.nan, np.inf):
        spoiled = np.array(x)
        spoiled[1, 2, 0] = bad
        found = clip(params, jnp.asarray(spoiled), jnp.ones(3, bool)).sum
        for one, other in zip(jax.tree.leaves(found), kept, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "loss",
    in_full(
        (plain, within_and_outside, carried_and_changed),
        *(within_and_outside, carried_and_changed),
    ),
    ids=name_of,
)
def test_no_example_moves_the_sum_by_more_than_its_norm(loss):
    params, x = inputs(20)
    params = {name: leaf / 3 for name, leaf in params.items()}
    params, x = cast((params, x), "float32")
    assert_bounded(loss, params, x)


def test_planted_only_the_last_step_is_counted(monkeypatch):
    """Norms that forget steps are found by the comparison with the oracle."""
    params, x = inputs()
    count_only_the_last_step(monkeypatch)
    with pytest.raises(AssertionError):
        check(plain, params, x, strategies=("bk",))
