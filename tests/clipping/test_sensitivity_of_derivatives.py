"""What a loss does not show: rules of its derivative, meshes, keys, and underflow.

No example alone moves the sum by more than C, times what `test_sensitivity` allows.
"""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from oracle import alone, distinct, draw

from cases import tuples_in_full
from tanager.clipping import clipped_grad
from tanager.clipping.analysis.standardise import standardise
from trees import distance


SLACK = 1.001


def clipped(loss, params, batch, clip_norm=1.0):
    """What rows together move the sum by, and their norms, by each strategy."""

    @jax.jit
    def every(params, batch):
        return {
            name: clipped_grad(loss, clip_norm=clip_norm, strategy=name)(params, batch)
            for name in distinct(loss, params, batch)
        }

    zeros = jax.tree.map(jnp.zeros_like, params)
    return {
        name: (distance(out.sum, zeros), np.asarray(out.norms))
        for name, out in every(params, batch).items()
    }


@jax.custom_vjp
def cut_off(x):
    return x


cut_off.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -1, 1),))


@jax.custom_vjp
def of_length_one(x):
    return x


of_length_one.defvjp(lambda x: (x, None), lambda _, dx: (dx / jnp.linalg.norm(dx),))


@pytest.mark.parametrize("changed", [cut_off, of_length_one])
def test_a_backward_pass_that_is_not_linear(changed):
    def loss(w, example):
        return 1e4 * jnp.sum(changed(example["x"] @ w))

    w, x = jnp.ones((4, 3)), jnp.full((1, 4), 1e3)
    expected = jnp.linalg.norm(jax.grad(loss)(w, {"x": x[0]}))
    for size, norms in clipped(loss, w, {"x": x}).values():
        np.testing.assert_allclose(norms, [expected], rtol=1e-6)
        assert 0.999 <= size <= SLACK


@pytest.mark.parametrize(("kind", "large"), [(jnp.float32, 3e38), (jnp.float16, 6e4)])
def test_a_backward_pass_near_the_largest_number(kind, large):
    def loss(w, example):
        y = (example["x"] @ w).astype(kind)
        return jnp.sum(y * example["dy"]).astype(jnp.float32)

    batch = {"x": jnp.full((2, 1), 1e-39), "dy": jnp.full((2, 1), large, kind)}
    for size, _ in clipped(loss, jnp.ones((1, 1)), batch).values():
        assert size <= 2 * SLACK  # two rows; and no NaN


@custom_vmap
def mixed(dx):
    return dx


@mixed.def_vmap
def _(size, batched, dx):
    del size, batched
    return jnp.broadcast_to(jnp.sum(dx, axis=0), dx.shape), True


@jax.custom_vjp
def mixed_backward(x):
    return x


mixed_backward.defvjp(lambda x: (x, None), lambda _, dx: (mixed(dx),))


@jax.custom_jvp
def mixed_forward(x):
    return x


@mixed_forward.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * mixed(primals[0])


# The loss is refused before a strategy is chosen: one strategy is enough.


@pytest.mark.parametrize("mixing", [mixed_backward, mixed_forward])
def test_a_derivative_rule_that_mixes_examples_is_refused(mixing):
    def loss(w, example):
        return jnp.sum(mixing(example["x"] @ w))

    with pytest.raises(ValueError, match="custom_vmap_call, which may mix"):
        clipped_grad(loss, clip_norm=1.0)(jnp.ones((2, 2)), {"x": jnp.ones((2, 2))})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda y: (y, y), "must return the loss alone"),
        (lambda y: y.astype(jnp.int32), "must return one floating-point scalar"),
    ],
)
def test_what_is_no_scalar_is_refused_whatever_its_derivative(result, message):
    def loss(w, example):
        return result(jnp.sum(jax.nn.relu(example["x"] @ w)))

    with pytest.raises(ValueError, match=message):
        clipped_grad(loss, clip_norm=1.0)(jnp.ones((2, 2)), {"x": jnp.ones((2, 2))})


@jax.custom_vjp
def summed_backward(x):
    return x


summed_backward.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, "data"),))


def on_a_mesh(loss, *, check, split=(None, "data")):
    grad_fn = clipped_grad(loss, clip_norm=1.0)
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), axis_types=kinds)
    spread = jax.shard_map(
        lambda w, x: grad_fn(w, {"x": x}).norms,
        mesh=mesh,
        in_specs=tuple(map(jax.P, split)),
        out_specs=jax.P("data"),
        check_vma=check,
    )
    return jax.jit(spread)(jnp.ones((4, 4)), jnp.arange(8.0).reshape(2, 4))


@pytest.mark.cpu
def test_a_derivative_rule_that_meets_other_devices_is_refused():
    def loss(w, example):
        return jnp.sum(summed_backward(w @ example["x"]))

    with pytest.raises(ValueError, match="psum over the axis data"):
        on_a_mesh(loss, check=False)


@pytest.mark.cpu
def test_a_mesh_that_shares_parameters_is_refused():
    """There the gradient of an example would be summed over devices."""

    def loss(w, example):
        return jnp.sum(w @ example["x"])

    for split in ((None, "data"), ("data", None)):
        with pytest.raises(ValueError, match="check_vma=False"):
            on_a_mesh(loss, check=True, split=split)
    norms = on_a_mesh(loss, check=False)
    expected = 2 * np.linalg.norm(np.arange(8.0).reshape(2, 4), axis=1)
    np.testing.assert_allclose(norms, expected, rtol=1e-6)


class Axis(enum.Enum):
    VIEWS = 1


def test_a_collective_over_an_axis_that_is_no_string_is_refused():
    def loss(w, example):
        return jnp.sum(w @ example["x"]) * lax.psum(jnp.sum(example["x"]), Axis.VIEWS)

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    each = jax.vmap(
        lambda x: grad_fn(jnp.ones((4, 4)), {"x": x}).norms, axis_name=Axis.VIEWS
    )
    with pytest.raises(ValueError, match="must not mix examples"):
        each(jnp.ones((2, 1, 4)))


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_keys_of_which_a_batch_uses_the_first_are_refused(kind):
    def loss(w, example):
        kept = jax.random.bernoulli(example["key"], 0.5, (8,))
        return jnp.sum((example["x"] @ w) * kept.astype(jnp.float32))

    keys = jax.random.split(jax.random.key(0, impl=kind), 3)
    w, batch = jnp.ones((4, 8)), {"x": jnp.ones((3, 4)), "key": keys}
    if kind == "threefry2x32":
        one = jax.grad(loss)(w, jax.tree.map(lambda leaf: leaf[2], batch))
        norms = clipped_grad(loss, clip_norm=1.0)(w, batch).norms
        np.testing.assert_allclose(norms[2], jnp.linalg.norm(one), rtol=2e-6)
    else:
        with pytest.raises(ValueError, match="use threefry keys"):
            clipped_grad(loss, clip_norm=1.0)(w, batch)


def product(scale):
    return lambda w, e: jnp.vdot(e["x"] @ (scale * w), e["dy"])


def convolution(scale):
    def loss(w, example):
        y = lax.conv_general_dilated(
            example["x"][None],
            scale * w[None],
            (1,),
            "VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return jnp.vdot(y, example["dy"])

    return loss


@pytest.mark.parametrize(
    ("kind", "positions", "scale", "norm"),
    tuples_in_full(
        [
            (kind, positions, *scale)
            for kind in (product, convolution)
            for positions in (1, 64)
            for scale in ((1.0, 1e-9), (2.0**20, 0.01))
        ],
        *((convolution, 1, 1.0, 1e-9), (convolution, 1, 2.0**20, 0.01)),
    ),
)
def test_gram_matrices_that_underflow(kind, positions, scale, norm):
    inputs, outputs = 4096, 4
    batch = {
        "x": jnp.full((1, positions, inputs), 9e-20),
        "dy": jnp.full((1, positions, outputs), 2.0**31),
    }
    w = jnp.zeros((inputs, outputs))
    for size, _ in clipped(kind(scale), w, batch, norm).values():
        assert 0.25 * norm <= size <= SLACK * norm


def seen_dense(w, example):
    return jnp.sum(example["x"] @ standardise(w["w"], w["gain"])) * example["dy"]


def seen_convolved(w, example):
    y = lax.conv_general_dilated(
        example["x"][None, None, None],
        standardise(w["w"][None, None], w["gain"]),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return jnp.sum(y) * example["dy"]


@pytest.mark.parametrize("loss", [seen_dense, seen_convolved])
@pytest.mark.parametrize("gain", [0.0, 1e-5, 2.0**-9])
def test_a_gain_whose_gradient_cancels(gain, loss):
    w = 1e4 * draw(0, (256, 1))[0].astype(np.float64)
    along = w[:, 0] - w.mean()
    along /= np.linalg.norm(along)
    x = draw(1, (300, 256))[0].astype(np.float64)
    x -= np.outer(x @ along, along)
    params = {"w": jnp.asarray(w, jnp.float32), "gain": jnp.full(1, gain)}
    batch = {"x": jnp.asarray(x, jnp.float32), "dy": jnp.full(300, 1e8)}
    for sizes, _ in alone(loss, params, batch, 1e-3).values():
        assert np.max(sizes) <= SLACK * 1e-3


@pytest.mark.cpu
@pytest.mark.parametrize(("positions", "inputs"), [(0, 4), (5, 0)])
def test_what_is_empty_has_no_gradient(positions, inputs):
    def loss(w, example):
        return jnp.sum(w["a"] @ example["x"]) + jnp.sum(example["z"] @ w["b"])

    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((inputs, 2))}
    x = jnp.arange(6.0).reshape(2, 3)
    batch = {"x": x, "z": jnp.zeros((2, positions, inputs))}
    expected = np.sqrt(2) * np.linalg.norm(x, axis=1)
    for _, norms in clipped(loss, params, batch).values():
        np.testing.assert_allclose(norms, expected, rtol=1e-6)


@pytest.mark.cpu
def test_integer_images_meet_integer_kernels():
    def loss(w, example):
        y = lax.conv_general_dilated(
            example["image"][None],
            example["kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.ravel(y).astype(jnp.float32) @ w

    image = jnp.arange(2 * 16).reshape(2, 4, 4, 1)
    batch = {"image": image, "kernel": jnp.ones((2, 3, 3, 1, 1), image.dtype)}
    windows = [image[:, i : i + 3, j : j + 3] for i in (0, 1) for j in (0, 1)]
    sums = [np.sum(window, axis=(1, 2, 3)) for window in windows]
    for _, norms in clipped(loss, jnp.ones(4), batch).values():
        np.testing.assert_allclose(norms, np.linalg.norm(sums, axis=0), rtol=1e-6)


def test_parameters_of_float64_in_a_model_of_float32():
    with jax.enable_x64(True):

        def loss(w, example):
            narrow = w.astype(jnp.float32)
            return jnp.sum(jnp.tanh(example["x"] @ (jnp.sin(narrow) + narrow)))

        w, x = jnp.asarray(draw(0, (3, 2))[0], jnp.float64), draw(1, (2, 3))[0]
        x = jnp.asarray(x, jnp.float32)
        expected = [jnp.linalg.norm(jax.grad(loss)(w, {"x": row})) for row in x]
        for _, norms in clipped(loss, w, {"x": x}).values():
            np.testing.assert_allclose(norms, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("gain", "clip_norm"), tuples_in_full([(1e15, 1e-6), (1e18, 1e-3)], (1e15, 1e-6))
)
def test_squares_that_vanish_before_a_large_gain(gain, clip_norm):
    def loss(params, example):
        y = lax.conv_general_dilated(
            example["image"][None],
            standardise(params["kernel"], params["gain"]),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.sum(y[0] * example["to"])

    kernel, image = map(jnp.float32, draw(0, (3, 3, 4, 3), (1, 12, 12, 4)))
    params = {"kernel": kernel, "gain": jnp.full(3, gain, jnp.float32)}
    batch = {"image": image, "to": jnp.full((1, 12, 12, 3), 1e-21)}
    for moved, norms in clipped(loss, params, batch, clip_norm).values():
        assert norms[0] > clip_norm
        assert 0.9 * clip_norm <= moved <= SLACK * clip_norm


def test_squares_that_vanish_before_a_scale():
    def loss(w, example):
        return jnp.sum(((w * 2.0**20) @ example["x"]) * example["to"])

    batch = {"x": jnp.ones((1, 20, 64)), "to": jnp.full((1, 20, 64), 1e-19 / 64)}
    found = clipped(loss, jnp.zeros((20, 20)), batch, 1e-12)
    assert len(found) > 2
    for strategy, (moved, _) in found.items():
        # Norms by Gram matrices have what may have vanished added.
        least = 0 if strategy == "bk" else 0.9e-12
        assert least < moved <= SLACK * 1e-12
