"""Scans whose steps take slices of stacked parameters: one tap for all layers.

Every structure is compared with `vmap(grad)`, in float64, by several strategies.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from oracle import cast, check, curve, draw, read
from scan_cases import assert_bounded, count_only_the_last_step, name_of

from cases import in_full
from switch import FULL
from tanager.clipping import clipped_grad
from tanager.clipping.analysis import opening
from tanager.clipping.analysis.jaxprs import every_equation
from tanager.clipping.analysis.opening import LONGEST_UNROLLED_SCAN
from tanager.clipping.rules.groups import Single


ROWS, LAYERS, SIZE = 3, 4, 4
SHAPES = {
    "w": (LAYERS, SIZE, SIZE),
    "b": (LAYERS, SIZE),
    "g": (LAYERS, SIZE),
    "u": (SIZE, SIZE),
    "h": (SIZE,),
}


def slices(p, *names):
    return {name: p[name] for name in names}


def layers(p, x, **options):
    def layer(y, own):
        y = jnp.tanh(own["w"] @ y + own["b"])
        return y, jnp.sum(y)

    x, sums = lax.scan(layer, x[0], slices(p, "w", "b"), **options)
    return curve(x) + curve(sums * jnp.arange(float(len(sums)), dtype=sums.dtype))


def block(p, x):
    """Of a transformer: layer norm with 1 + g, attention, and what all layers share."""

    def norm(x, g):
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * (1 + g)

    @jax.checkpoint
    def layer(x, own):
        y = norm(x, own["g"][None]) @ own["w"]
        x = x + jax.nn.softmax(y @ y.T) @ y @ p["u"].T + own["b"][None]
        return x, None

    return curve(lax.scan(layer, x, slices(p, "w", "b", "g"))[0])


def made_in_the_step(p, x):
    def layer(y, own):
        unit = own["w"] / jnp.sqrt(jnp.sum(own["w"] ** 2, axis=0, keepdims=True) + 1)
        return jnp.tanh((unit * own["g"][:, None] + p["u"]) @ y + own["b"]), None

    return curve(lax.scan(layer, x[0], slices(p, "w", "b", "g"))[0])


def with_data_of_each_step(p, x):
    def layer(y, own):
        own, now, number = own
        return jnp.tanh(own["w"] @ (y + now) * number + own["b"]), 2.0

    numbers = jnp.arange(1.0, 1 + LAYERS, dtype=x.dtype)
    own = slices(p, "w", "b"), x, numbers
    last, twos = lax.scan(layer, p["h"], own)
    return curve(last) * jnp.sum(twos).astype(x.dtype)


def used_outside_too(p, x):
    y = layers(p, x)
    return y + curve(p["w"][1] @ x[1]) + 0.1 * jnp.sum(p["b"] ** 2)


def in_two_scans(p, x):
    def layer(y, w):
        return jnp.tanh(w.T @ y), None

    return layers(p, x) + curve(lax.scan(layer, x[1], p["w"], reverse=True)[0])


def slices_come_out(p, x):
    def layer(y, own):
        return jnp.tanh(own["w"] @ y), own["b"]

    last, every = lax.scan(layer, x[0], slices(p, "w", "b"))
    return curve(every * last[None])


def a_slice_is_the_next_carry(p, x):
    def layer(y, own):
        return own["b"] + 1, jnp.tanh(own["w"] @ y)

    last, every = lax.scan(layer, x[0], slices(p, "w", "b"))
    return curve(last) + curve(every)


def parts_of_slices(p, x):
    def layer(y, own):
        up, down = jnp.split(own["w"], 2)
        return jnp.tanh(jnp.concatenate([up @ y, -down @ y]) + own["b"][::-1]), None

    return curve(lax.scan(layer, x[0], slices(p, "w", "b"))[0])


def twice_in_a_step(p, x):
    def layer(y, own):
        y = jnp.tanh(own["w"] @ y)
        return jnp.tanh(own["w"] @ y + own["b"] * y), None

    return curve(lax.scan(layer, x[0], slices(p, "w", "b"))[0])


def flat_and_branches(p, x):
    def layer(y, own):
        first = lambda y: own["w"] @ y + own["b"]  # noqa: E731
        y = lax.cond(y[0] > 0, first, lambda y: jnp.sin(own["b"] * y), y)
        return jnp.tanh(y) + lax.stop_gradient(own["g"]) * y, None

    return curve(lax.scan(layer, x[0], slices(p, "w", "b", "g"))[0])


def of_custom_derivatives(p, x):
    @jax.custom_jvp
    def scaled(w, y):
        return w * y

    @scaled.defjvp
    def _(primals, tangents):
        (w, y), (dw, dy) = primals, tangents
        return w * y, dw * y + 2 * w * dy

    def layer(y, own):
        return jnp.tanh(scaled(own["g"], y) + own["w"] @ y), None

    return curve(lax.scan(layer, x[0], slices(p, "w", "g"))[0])


def convolved(p, x):
    def layer(image, own):
        image = lax.conv_general_dilated(
            image,
            own["w"].reshape(2, 2, 2, 2),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.tanh(image + own["b"].reshape(1, 1, 2, 2)), None

    image = jnp.outer(x[0], x[1]).reshape(2, 2, 2, 2)
    return curve(lax.scan(layer, image, slices(p, "w", "b"))[0])


def looked_up(p, x):
    def layer(y, own):
        row = own["w"][jnp.int32(jnp.abs(y[0]) * 100) % SIZE]
        return jnp.tanh(row * y + own["b"]), None

    return curve(lax.scan(layer, x[0], slices(p, "w", "b"))[0])


def scanned_within(p, x):
    def layer(y, own):
        def inner(y, now):
            return jnp.tanh(own["w"] @ y + now), None

        return lax.scan(inner, y, x)[0], None

    return curve(lax.scan(layer, x[0], slices(p, "w"))[0])


ROLLED = [
    *(block, made_in_the_step, with_data_of_each_step, used_outside_too),
    *(in_two_scans, slices_come_out, a_slice_is_the_next_carry, parts_of_slices),
    *(twice_in_a_step, flat_and_branches, of_custom_derivatives),
]
# `in_two_scans` has one scan of each kind.
MORE = [layers, functools.partial(layers, reverse=True)]
WRITTEN_OUT = [convolved, looked_up, scanned_within]


def inputs(layers=LAYERS):
    shapes = [
        s if name in "uh" else (layers, *s[1:])
        for name, s in zip(SHAPES, SHAPES.values(), strict=True)
    ]
    *arrays, x = draw(5, *shapes, (ROWS, LAYERS, SIZE), scale=0.7)
    return dict(zip(SHAPES, arrays, strict=True)), x


def scans_of(program):
    return [tap for tap in program.taps if tap.equation.primitive.name == "scan"]


def test_slices_that_come_out_and_are_not_used_are_no_second_use():
    """So `nnx.scan` returns the parameters of its layers."""

    def loss(p, x):
        def layer(y, own):
            return jnp.tanh(own["w"] @ y + own["b"]), own

        return curve(lax.scan(layer, x[0], slices(p, "w", "b"))[0])

    params, x = inputs()
    assert [type(group) for group in read(loss, params, x)[1]] == [Single, Single]
    check(loss, params, x, methods=True)


@pytest.mark.parametrize("loss", in_full(MORE + ROLLED, *MORE), ids=name_of)
def test_what_is_clipped_is_the_gradient(loss):
    params, x = inputs()
    program, groups = read(loss, params, x)
    assert any(tap.all_steps for tap in program.taps)
    assert not scans_of(program)
    assert len(program.taps) < 12
    check(loss, params, x, methods=len(groups) < 6)


@pytest.mark.parametrize("loss", WRITTEN_OUT, ids=name_of)
def test_layers_that_are_faster_apart_are_written_out(loss):
    params, x = inputs()
    program, _ = read(loss, params, x)
    met = [tap for tap in program.taps if tap.uses[0].links]
    assert len(met) >= LAYERS and not scans_of(program)
    if FULL or loss is not convolved:  # a layer is as one of looked_up: its own tap
        check(loss, params, x)
    params, _ = inputs(LONGEST_UNROLLED_SCAN + 1)
    assert len(read(loss, params, x)[0].taps) < 4
    if FULL or loss is looked_up:  # a scan is one tap, whatever is in it
        check(loss, params, x, strategies=("bk", "auto"))


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.full), LONGEST_UNROLLED_SCAN + 1]
)
def test_any_number_of_layers(count):
    params, x = inputs(count)
    params["w"] /= 3
    program, _ = read(layers, params, x)
    assert not scans_of(program)
    check(layers, params, x)


def test_all_layers_of_a_product_are_one_group_with_a_gram():
    params, x = inputs()
    groups = {group.leaves: group for group in read(block, params, x)[1]}
    assert len(groups) == 4 and all(isinstance(g, Single) for g in groups.values())
    assert sum(bool(group.grams()) for group in groups.values()) == 2
    shown = " ".join(group.rule.describe() for group in groups.values())
    assert f"dot_general float32[{LAYERS}," in shown


def test_the_size_of_a_program_does_not_grow_with_the_layers():
    def count(number):
        params, x = cast(inputs(number), "float32")
        clip = clipped_grad(block, clip_norm=1.0, strategy="bk")
        jaxpr = jax.make_jaxpr(clip)(params, x)
        return len(list(every_equation(jaxpr.eqns)))

    assert count(300) < 1.2 * count(4)


@pytest.mark.parametrize(
    "loss",
    in_full((layers, block, in_two_scans), block, in_two_scans),
    ids=name_of,
)
def test_no_example_moves_the_sum_by_more_than_its_norm(loss):
    params, x = cast(inputs(), "float32")
    assert_bounded(loss, params, x)


def test_planted_only_the_last_layer_is_counted(monkeypatch):
    """Norms that forget layers are found by the comparison with the oracle."""
    params, x = inputs()
    count_only_the_last_step(monkeypatch)
    with pytest.raises(AssertionError):
        check(layers, params, x, strategies=("bk",))


def test_planted_what_is_made_of_slices_is_made_of_the_first(monkeypatch):
    params, x = inputs()
    right = opening._for_each_step

    def first(*given):
        return [
            mark._replace(value=jnp.broadcast_to(mark.value[:1], mark.value.shape))
            for mark in right(*given)
        ]

    monkeypatch.setattr(opening, "_for_each_step", first)
    with pytest.raises(AssertionError):
        check(made_in_the_step, params, x, strategies=("bk",))
