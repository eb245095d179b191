"""Parameters that are broadcast, cut up, cast or made narrow: every strategy, each row.

No example alone moves the sum by more than C, times what `test_sensitivity` allows.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.buffer_callback import buffer_callback
from oracle import alone, distinct, draw, norms_of

from cases import in_full, tuples_in_full
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.standardise import standardise


C = 0.5
SLACK = 1.001


def float32(*arrays):
    return [jnp.asarray(array, jnp.float32) for array in arrays]


def halves(w, example):
    whole = jnp.broadcast_to(w[None], (2, 4))
    one, other = jnp.split(whole, 2)
    return jnp.sum(one @ example["x"][0]) + jnp.sum(other @ example["x"][1])


def repeated(w, example):
    whole = jnp.repeat(w, 2)
    return whole[:4] @ example["x"][0] + whole[4:] @ example["x"][1]


def tiled(w, example):
    whole = jnp.tile(w, 2)
    return whole[:4] @ example["x"][0] + whole[4:] @ example["x"][1]


def layers_alike(w, example):
    def layer(carry, own):
        return carry + own @ example["x"][0], None

    every = jnp.broadcast_to(w[None], (16, 4))
    return lax.scan(layer, jnp.zeros(()), every)[0]


@pytest.mark.parametrize("loss", [halves, repeated, tiled, layers_alike])
def test_parts_of_a_broadcast_parameter_are_the_same_parameter(loss):
    w, x = float32(np.ones(4), np.broadcast_to(draw(1, (5, 1, 4))[0], (5, 2, 4)))
    exact = norms_of(loss, w, {"x": x})
    for sizes, norms in alone(loss, w, {"x": x}, C).values():
        assert np.max(sizes) <= SLACK * C
        np.testing.assert_allclose(norms, exact, rtol=1e-5)


def cut(w, example):
    kernel = standardise(w["w"], w.get("gain"))
    y = example["x"] @ kernel[:4] + example["other"] @ kernel[4:]
    return jnp.sum(y * example["dy"])


def by_offset(w, example):
    kernel = standardise(w["w"], w.get("gain"))
    x = jnp.stack([example["x"], example["other"]]).reshape(8)
    return sum(jnp.vdot(x[n] * kernel[n], example["dy"]) for n in range(8))


def by_output(w, example):
    kernel = standardise(w["w"], w.get("gain"))
    x = jnp.concatenate([example["x"], example["other"]])
    one, other = jnp.split(kernel, 2, axis=1)
    return x @ one @ example["dy"][:2] + x @ other @ example["dy"][2:]


@pytest.mark.parametrize(
    ("loss", "gained"),
    tuples_in_full(
        list(itertools.product((cut, by_offset, by_output), (False, True))),
        *((cut, False), (by_offset, False), (by_output, True)),
    ),
)
def test_parts_of_a_standardised_kernel_move_its_mean_together(loss, gained):
    (weight,) = float32(draw(2, (8, 4))[0])
    params = {"w": weight}
    if gained:
        params["gain"] = jnp.full(4, 1e-2, jnp.float32)
    x, other, dy = float32(*draw(3, (6, 4), (6, 4), (6, 4)))
    # Along the signs of the weights, where all offsets add to the gain's gradient.
    x = x.at[0].set(jnp.sign(weight[:4, 0]))
    other = other.at[0].set(jnp.sign(weight[4:, 0]))
    x, other = x.at[1].set(1), other.at[1].set(-1)
    batch = {"x": x, "other": other, "dy": 100 * dy}
    exact = norms_of(loss, params, batch, wide=False)
    for sizes, norms in alone(loss, params, batch, C).values():
        assert np.max(sizes) <= SLACK * C
        np.testing.assert_allclose(norms, exact, rtol=1e-4)


def one_offset(w, example):
    y = lax.conv_general_dilated(
        example["x"][None, :, None],
        standardise(w[None]),
        (1,),
        "VALID",
        dimension_numbers=("NCW", "WIO", "NWC"),
    )
    return jnp.sum(y) * example["dy"]


def one_product(w, example):
    return jnp.sum(example["x"] @ standardise(w)) * example["dy"]


@pytest.mark.parametrize("loss", [one_offset, one_product])
def test_sums_of_a_standardised_gradient_that_overflow_when_squared(loss):
    (w,) = float32(draw(7, (64, 1))[0])
    centred = np.float64(w[:, 0]) - np.mean(np.float64(w))
    centred /= np.linalg.norm(centred)
    other = draw(8, (64,))[0]
    other = other - other.mean() - (other @ centred) * centred
    other /= np.linalg.norm(other)
    along = [np.full(64, 1 / 8), centred]
    x = np.stack([2.0**30 * (0.9 * one + 0.436 * other) for one in along] * 2)
    x, dy = float32(x, [2.0**33] * 2 + [2.0**28] * 2)
    for sizes, _ in alone(loss, w, {"x": x, "dy": dy}, C).values():
        assert np.max(sizes) <= SLACK * C


@pytest.mark.parametrize("size", [1e-19, 1e-12, 1e10])
def test_a_parameter_that_is_used_times_a_number(size):
    def loss(w, example):
        return jnp.vdot(example["x"] @ (size * w), example["dy"])

    scale = jnp.broadcast_to(
        2.0 ** jnp.array([28.0, 10, 0, -10])[:, None, None], (4, 2, 64)
    )
    batch = {"x": 2 * scale, "dy": scale}
    for sizes, _ in alone(loss, jnp.zeros((64, 64)), batch, 0.1).values():
        assert np.max(sizes) <= SLACK * 0.1


def integers(w, example):
    with jax.numpy_dtype_promotion("standard"):
        return jnp.sum((example["x"] @ w) * example["dy"])


@pytest.mark.parametrize("kind", in_full([jnp.int32, jnp.uint8, jnp.bool_], jnp.uint8))
def test_integers_meet_parameters_as_they_are(kind):
    x = np.asarray([[[1, 0], [1, 1]], [[1, 1], [1, 1]], [[0, 1], [1, 0]]])
    dy = np.asarray([[[1.0], [-0.9]], [[0.3], [0.2]], [[1.0], [2.0]]])
    batch = {"x": jnp.asarray(x, kind), "dy": jnp.asarray(dy, jnp.float32)}
    w = jnp.ones((2, 1))
    own = np.einsum("bti,bto->bio", x, dy)
    norms = np.linalg.norm(own, axis=(1, 2))
    total = np.tensordot(np.minimum(1, C / norms), own, 1)
    names = distinct(integers, w, batch)
    made = {n: clipped_grad(integers, clip_norm=C, strategy=n) for n in names}
    every = jax.jit(lambda *given: {n: each(*given) for n, each in made.items()})
    for strategy, out in every(w, batch).items():
        np.testing.assert_allclose(out.norms, norms, rtol=1e-4, err_msg=strategy)
        np.testing.assert_allclose(out.sum, total, atol=1e-5, err_msg=strategy)


def near(weight, count, angles):
    """Images `[count, 1, 1, n]` at small angles to the centred weights, in float64."""
    generator = np.random.default_rng(6)
    centred = np.asarray(weight, np.float64).ravel()
    centred = (centred - centred.mean()) / np.linalg.norm(centred - centred.mean())
    other = generator.standard_normal((count, centred.size))
    other -= other.mean(1, keepdims=True) + (other @ centred)[:, None] * centred
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    angle = np.exp(generator.uniform(np.log(angles[0]), np.log(angles[1]), (count, 1)))
    return (np.cos(angle) * centred + np.sin(angle) * other)[:, None, None]


def seen_through(kernel_of):
    def loss(w, example):
        y = lax.conv_general_dilated(
            example["x"][None],
            kernel_of(w).astype(example["x"].dtype),
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum(y * example["dy"])

    return loss


def rounded(w):
    return standardise(w).astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("case", ["bfloat16 weights", "bfloat16 kernel", "float64"])
def test_what_a_kernel_was_rounded_to_does_not_pass_for_its_gradient(case):
    kernel_of, weights, data, angles = {
        "bfloat16 weights": (standardise, jnp.bfloat16, jnp.float32, (1e-3, 0.1)),
        "bfloat16 kernel": (rounded, jnp.float32, jnp.float32, (1e-3, 0.1)),
        "float64": (standardise, jnp.float32, jnp.float64, (1e-6, 1e-2)),
    }[case]
    loss = seen_through(kernel_of)
    with jax.enable_x64(case == "float64"):
        for seed in range(4):
            w = jnp.asarray(draw(seed, (1, 1, 64, 1))[0], weights)
            x = jnp.asarray(near(w, 100, angles), data)
            batch = {"x": x, "dy": jnp.full(len(x), 1e4, data)}
            for sizes, _ in alone(loss, w, batch, C).values():
                assert np.max(sizes) <= SLACK * C


def test_weights_far_from_zero_do_not_hide_a_gradient():
    """The model's own mean of them is wrong by a part of their deviation."""
    loss, ones = seen_through(standardise), np.repeat([0.125, -0.125], 12)
    for far in (2.0**12, 2.0**20):
        w = jnp.asarray(draw(0, (1, 1, 64, 1))[0] + far, jnp.float32)
        # Along the weights and along ones, nothing is left by standardisation.
        x = np.float32(near(w, 24, (0.3, 0.8)) + ones[:, None, None, None])
        batch = {"x": x, "dy": np.full(24, 1e4, np.float32)}
        for sizes, _ in alone(loss, w, batch, C).values():
            assert np.max(sizes) <= SLACK * C


@pytest.mark.parametrize("strategy", ["per_example", "bk"])
def test_a_sum_at_narrow_standardised_weights_is_not_rounded(strategy):
    w = jnp.asarray([1, -1] * 32, jnp.bfloat16)[:, None]

    def loss(w, example):
        y = example["x"] @ standardise(w).astype(jnp.float32)
        return jnp.sum(y) * example["dy"]

    rows = 1100
    x = jnp.tile(jnp.asarray([1.0, 1, -1, -1] * 16), (rows, 1))
    batch = {"x": x, "dy": jnp.full(rows, 1e4)}
    grad_fn = jax.jit(clipped_grad(loss, clip_norm=8.0, strategy=strategy))
    sums = [grad_fn(w, batch, jnp.arange(rows) < n).sum for n in range(1010, 1060, 7)]
    moved = [np.linalg.norm(b - a) for a, b in itertools.pairwise(sums)]
    assert max(moved) <= 7 * SLACK * 8


def twice(w, example):
    y = example["x"] @ w
    return jnp.sum(y * example["a"]) + jnp.sum(y * example["b"])


def narrow(w, example):
    y = (example["x"] @ w)[:, 0].astype(jnp.bfloat16)
    return jnp.sum((y * example["dy"]).astype(jnp.float32))


def test_a_backward_pass_that_cancels_before_the_tap():
    a = 2.0 * np.random.default_rng(0).integers(2**23, 2**24, 512)
    batch = {"x": np.full((512, 1), 0.7), "a": a[:, None], "b": 2 - a[:, None]}
    batch = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in batch.items()}
    for sizes, _ in alone(twice, jnp.ones((1, 1)), batch).values():
        assert np.max(sizes) <= SLACK


def test_a_narrow_stretch_between_wide_taps():
    larger = np.random.default_rng(0).uniform(1, 2, 512)
    dy = jnp.asarray(np.stack([larger, larger + 2**-7], 1), jnp.bfloat16)
    x = jnp.broadcast_to(jnp.asarray([[1.0], [-1.0]]), (512, 2, 1))
    for norm in (1e-3, 1.23e-3):
        found = alone(narrow, jnp.ones((1, 1)), {"x": x, "dy": dy}, norm)
        for sizes, _ in found.values():
            assert np.max(sizes) <= SLACK * norm


def sum_of_convolution(w, example):
    y = lax.conv_general_dilated(
        example["image"][None],
        example["kernel"],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.sum(jnp.tanh(y.ravel() @ w))


@pytest.mark.parametrize(
    ("wide", "strategy"),
    tuples_in_full(
        list(itertools.product((False, True), ("per_example", "bk"))),
        (False, "per_example"),
    ),
)
def test_nan_stays_in_its_row_where_data_meets_data(wide, strategy):
    with jax.enable_x64(wide):
        kind = jnp.float64 if wide else jnp.float32
        image, kernel, w = (
            jnp.asarray(each, kind)
            for each in draw(9, (4, 6, 6, 1), (4, 3, 3, 1, 2), (32, 3))
        )
        w = 0.1 * w
        batch = {"image": image, "kernel": kernel}
        grad_fn = jax.jit(
            functools.partial(
                clipped_grad(sum_of_convolution, clip_norm=C, strategy=strategy), w
            )
        )
        others = grad_fn(batch, jnp.arange(4) > 0)
        spoilt = grad_fn(batch | {"image": image.at[0].set(jnp.nan)})
        assert np.max(np.abs(others.sum)) > 0
        np.testing.assert_allclose(spoilt.sum, others.sum, atol=1e-5)
        np.testing.assert_allclose(spoilt.norms[1:], others.norms[1:], rtol=1e-5)


def chosen(w, example):
    x = example["x"]
    y = lax.cond(x[0] > 0, lambda h: w @ h + x, lambda h: h, x)
    return jnp.sum(jnp.tanh(y))


def long_chain(w, example):
    x = example["x"]

    def step(carry, _):
        return jnp.tanh(w @ carry + x), None

    return jnp.sum(lax.scan(step, x, None, length=100)[0])


@pytest.mark.parametrize("strategy", ["per_example", "bk"])
@pytest.mark.parametrize("loss", [chosen, long_chain])
def test_data_that_enters_a_branch_or_a_loop_twice(loss, strategy):
    w, x = float32(*draw(3, (4, 4), (5, 4)))
    w = 0.2 * w
    out = clipped_grad(loss, clip_norm=C, strategy=strategy)(w, {"x": x})
    exact = norms_of(loss, w, {"x": x}, wide=False)
    np.testing.assert_allclose(out.norms, exact, rtol=1e-4)


def no_turns(w, example):
    def step(carry, _):
        return carry + w @ example["x"], None

    turned, _ = lax.scan(step, jnp.zeros(4), None, length=0)
    return jnp.sum(turned) + w[0] @ example["x"]


@pytest.mark.parametrize("strategy", ["per_example", "bk"])
def test_a_loop_without_turns_and_a_batch_without_rows(strategy):
    w, x = float32(*draw(3, (4, 4), (5, 4)))
    grad_fn = clipped_grad(no_turns, clip_norm=C, strategy=strategy)
    np.testing.assert_allclose(
        grad_fn(w, {"x": x}).norms, jnp.linalg.norm(x, axis=1), rtol=1e-5
    )
    out = grad_fn(w, {"x": x[:0]})
    assert out.norms.shape == out.losses.shape == (0,)
    assert out.sum.shape == w.shape and not np.any(out.sum)


# The loss is refused before a strategy is chosen: one strategy is enough.


@pytest.mark.parametrize("mix", [lax.pmean, lax.all_gather])
def test_collectives_are_refused_where_their_axis_exists(mix):
    def loss(w, example):
        return jnp.sum(w @ example["x"]) * jnp.sum(mix(example["x"], "data"))

    grad_fn = clipped_grad(loss, clip_norm=C)
    spread = jax.shard_map(
        lambda w, x: grad_fn(w, {"x": x}).norms,
        mesh=jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="must not mix examples"):
        jax.jit(spread)(jnp.ones((4, 4)), jnp.ones((4, 4)))


SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def by_pure_callback(x, way):
    return jax.pure_callback(np.max, SCALAR, x, vmap_method=way)


def by_buffer_callback(x, way):
    def largest(context, out, x):
        np.asarray(out)[...] = np.asarray(x).max()

    return buffer_callback(largest, SCALAR, vmap_method=way)(x)


@pytest.mark.parametrize("way", ["expand_dims", "sequential"])
@pytest.mark.parametrize("largest", [by_pure_callback, by_buffer_callback])
def test_host_functions_are_refused(largest, way):
    def loss(w, example):
        return jnp.sum(w @ example["x"]) * largest(example["x"], way)

    with pytest.raises(ValueError, match=r"may remember earlier .* remove it from"):
        clipped_grad(loss, clip_norm=C)(jnp.ones((4, 4)), {"x": jnp.ones((2, 4))})


def test_references_that_outlive_the_loss_are_refused():
    memory = jax.new_ref(jnp.zeros(()))

    def remembers(w, example):
        memory[...] += jnp.sum(example)
        return jnp.sum(w * example) * memory[...]

    @jax.custom_vjp
    def passes(x):
        return x

    passes.defvjp(lambda x: (x, None), lambda _, dx: (dx * memory[...],))

    def remembers_backward(w, example):
        return jnp.sum(passes(w * example))

    for loss in (remembers, remembers_backward):
        grad_fn = clipped_grad(loss, clip_norm=C)
        for call in (grad_fn, jax.jit(grad_fn)):
            with pytest.raises(ValueError, match="mutable reference"):
                call(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize("inputs", [pytest.param(64, marks=pytest.mark.full), 4608])
def test_a_norm_that_standardisation_takes_nearly_all_of(inputs):
    w = draw(0, (1, 1, inputs, 1))[0]
    x = jnp.asarray(near(w, 200, (1e-3, 2e-2)), jnp.float32)
    batch = {"x": x, "dy": jnp.full(len(x), 1e2)}
    found = alone(seen_through(standardise), jnp.float32(w), batch, 1e-3)
    for sizes, _ in found.values():
        assert np.max(sizes) <= SLACK * 1e-3


@pytest.mark.parametrize(
    ("positions", "size", "slope"),
    tuples_in_full(
        [
            *[((), 5e-23, 4e12), ((3,), 5e-23, 4e12), ((), 1e-12, 1e4)],
            *[((3,), 1.0, 1.0), ((3,), 1e12, 1.0)],
            *[((3,), 1e-12, 1e4), ((), 1.0, 1.0), ((), 1e12, 1.0)],
        ],
        *[((3,), 1e-12, 1e4), ((), 1.0, 1.0), ((), 1e12, 1.0)],
    ),
)
def test_masks_of_every_size_and_rows_of_every_scale(positions, size, slope):
    """Of the first, squares vanish where XLA takes them apart: (x·c)² as x²·c²."""
    mask = (size * np.tri(4, 3) * [1, 1e-22, 1e3]).astype(np.float32)
    w, x = float32(*draw(31, (4, 3), (8, *positions, 4)))
    scales = np.float32(10.0) ** np.arange(-12, 12, 3)
    x = x * scales.reshape(-1, *[1] * (x.ndim - 1)).astype(np.float32)

    def loss(w, x):
        return slope * jnp.sum(x @ (w * jnp.asarray(mask, w.dtype)))

    exact = norms_of(loss, w, x)
    assert np.max(exact) > 10 * C
    for sizes, norms in alone(loss, w, x, C).values():
        assert np.max(sizes) <= SLACK * C
        counted = np.isfinite(norms) & (sizes > 0)
        # Norms below 1e-18 vanish when squared.
        least = exact[counted] * (1 - 1e-6) - 1e-18
        assert np.all(norms[counted] >= least)


@pytest.mark.parametrize("positions", [(), pytest.param((3,), marks=pytest.mark.full)])
def test_a_mask_that_rounding_makes(positions):
    """Norm and sum must not see two roundings of a mask that cancels."""
    w = 1 + 1e-4 * draw(32, (64, 48))[0]
    w, x = float32(w, draw(33, (4, *positions, 64))[0])

    def loss(w, x):
        return 1e9 * jnp.sum(x @ (w * lax.stop_gradient(w * w * w - w)))

    assert np.min(norms_of(loss, w, x, wide=False)) > 10 * C
    for sizes, _ in alone(loss, w, x, C).values():
        assert np.max(sizes) <= SLACK * C
        assert np.min(sizes) >= C / SLACK
