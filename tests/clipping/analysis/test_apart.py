"""No example reaches another: closed calls, answers of a batch, foreign calls, keys.

And what a trace assumes: flags beside the arrays, rules that ask which of
their operands vary, loops that no gradient passes.
"""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental import hijax, pallas
from jax.experimental.pallas import tpu
from oracle import distinct

from tanager.clipping import clipped_grad
from tanager.clipping.analysis.jaxprs import every_equation


DRAW = np.random.default_rng(0)
ROWS = 6
strategies = pytest.mark.parametrize("strategy", ["per_example", "bk"])


def normal(*shape):
    return jnp.asarray(DRAW.standard_normal(shape), jnp.float32)


def clip(loss, params, batch, strategy="bk", mask=None, clip_norm=1.0):
    return clipped_grad(loss, clip_norm=clip_norm, strategy=strategy)(
        params, batch, mask
    )


def added(loss, w, x):
    gradient = jax.jit(jax.grad(loss))
    return sum(np.asarray(gradient(w, row)) for row in x)


def convolve(image, kernel):
    return lax.conv_general_dilated(
        image[None],
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def in_a_branch(image, kernel):
    return lax.cond(image[0, 0, 0] > -99, convolve, convolve, image, kernel)


@jax.custom_jvp
def with_a_rule(image, kernel):
    return convolve(image, kernel)


with_a_rule.defjvp(lambda x, dx: jax.jvp(convolve, x, dx))

CLOSED = {
    "jit": jax.jit(convolve),
    "remat": jax.checkpoint(convolve),
    "branch": in_a_branch,
    "custom_jvp": with_a_rule,
    "scan": lambda image, kernel: lax.scan(
        lambda carry, _: (carry + convolve(image, kernel) / 70, None),
        jnp.zeros((1, 6, 6, 2), image.dtype),
        length=70,
    )[0],
}


@pytest.mark.parametrize("kind", CLOSED)
def test_convolutions_of_data_with_data_within_calls(kind):
    def loss(w, example):
        kernel = (w @ example["z"]).reshape(3, 3, 1, 2)
        return jnp.sum(jnp.tanh(CLOSED[kind](example["image"], kernel)) ** 2)

    w = 0.1 * normal(18, 5)
    batch = {"z": normal(ROWS, 5), "image": normal(ROWS, 6, 6, 1)}
    spoilt = batch | {"image": batch["image"].at[0].set(jnp.nan)}
    mask = jnp.arange(ROWS) != 0
    sums = []
    for strategy in distinct(loss, w, batch):
        grad_fn = clipped_grad(loss, clip_norm=1.0, strategy=strategy)
        sums += [grad_fn(w, batch, mask).sum, grad_fn(w, spoilt, mask).sum]
        sums += [grad_fn(w, spoilt, jnp.ones(ROWS, bool)).sum]
    assert len(sums) > 3
    for other in sums[1:]:
        np.testing.assert_allclose(other, sums[0], rtol=1e-5, atol=1e-6)


def scaled(image, kernel):
    return convolve(image / jnp.sum(image), kernel)  # NaN where the sum is 0


@jax.custom_jvp
def scaled_by_a_rule(image, kernel):
    return scaled(image, kernel)


scaled_by_a_rule.defjvp(lambda x, dx: jax.jvp(scaled, x, dx))


@pytest.mark.parametrize(
    "within",
    [
        jax.jit(scaled),
        scaled_by_a_rule,
        lambda *x: lax.cond(x[0][0, 0, 0] > -99, scaled, scaled, *x),
        lambda *x: lax.while_loop(
            lambda s: s[0] < 1, lambda s: (s[0] + 1, scaled(*x)), (0, convolve(*x))
        )[1],
    ],
)
def test_nan_that_begins_within_a_call_stays_in_its_row(within):
    """In float64, XLA on a CPU convolves all rows at once, with zeros between."""

    def loss(w, example):
        return jnp.sum(jnp.tanh(w * lax.stop_gradient(within(*example))))

    with jax.enable_x64(True):
        image = jnp.asarray(DRAW.standard_normal((ROWS, 6, 6, 1)))
        kernel = jnp.asarray(DRAW.standard_normal((ROWS, 3, 3, 1, 2)))
        w, mask = jnp.ones((1, 1, 1, 2)), jnp.arange(ROWS) != 0
        expected = clip(loss, w, (image, kernel), mask=mask).sum
        found = clip(loss, w, (image.at[0].set(0), kernel)).sum
    np.testing.assert_allclose(found, expected, rtol=1e-9)


# Of a branch JAX itself gives every row all operands.
@pytest.mark.parametrize("kind", sorted(CLOSED.keys() - {"branch"}))
def test_kernels_that_are_the_same_for_all_stay_one_within_calls(kind):
    kernel = normal(3, 3, 1, 2)

    def loss(w, example):
        image = CLOSED[kind](example["image"] * w, kernel)
        return jnp.sum(jnp.tanh(image) ** 2)

    batch = {"image": normal(ROWS, 6, 6, 1)}
    grad_fn = clipped_grad(loss, clip_norm=1.0, strategy="bk")
    w = jnp.ones((6, 6, 1))
    found = jax.jit(grad_fn)(w, batch)
    expected = clip(loss, w, batch, "per_example")
    np.testing.assert_allclose(found.sum, expected.sum, rtol=1e-5, atol=1e-6)
    jaxpr = jax.make_jaxpr(grad_fn)(w, batch).jaxpr
    made = [
        equation.params["feature_group_count"] * equation.params["batch_group_count"]
        for equation in every_equation(jaxpr.eqns)
        if equation.primitive.name == "conv_general_dilated"
    ]
    assert set(made) == {1}


def test_any_foreign_function_that_sees_the_batch_is_refused():
    def loss(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        mean = jax.ffi.ffi_call("mean", shape, vmap_method="broadcast_all")(x)
        return jnp.sum(w * mean)

    with pytest.raises(ValueError, match='vmap_method="broadcast_all"'):
        clip(loss, jnp.ones(3), normal(ROWS, 3))


def numbers(bits):
    return bits[:3].astype(jnp.float32)


@pytest.mark.parametrize(
    "draw",
    [
        lambda key: jax.random.normal(key, (3,)),
        lambda key: jax.random.gamma(key, 2.0, (3,)),
        lambda key: jax.random.dirichlet(key, jnp.ones(3)),
        lambda key: numbers(jax.random.key_data(jax.random.fold_in(key, 1))),
        lambda key: numbers(jax.random.key_data(jax.random.split(key, 1))[0]),
        lambda key: numbers(lax.rng_bit_generator(jax.random.key_data(key), (3,))[1]),
    ],
)
def test_draws_of_all_rows_from_one_rbg_key_are_refused(draw):
    keys = jax.random.split(jax.random.key(0, impl="unsafe_rbg"), ROWS)
    with pytest.raises(ValueError, match="rbg generator"):
        clip(lambda w, key: jnp.sum(w * draw(key)), jnp.ones(3), keys, "per_example")


@custom_vmap
def mix(x):
    return x


@mix.def_vmap
def _mixed(size, batched, x):
    return x - jnp.mean(x, 0, keepdims=True), True


@pytest.mark.parametrize("flag", [True, "train", (mix,)])
def test_a_flag_beside_the_arrays_is_checked_anew(flag):
    def loss(params, x):
        x = mix(x) if params["flag"] else x
        return jnp.sum(jnp.tanh(params["w"] * x))

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    x, w = normal(ROWS, 3), jnp.ones(3)
    grad_fn({"w": w, "flag": type(flag)()}, x)
    with pytest.raises(ValueError, match="custom_vmap_call"):
        grad_fn({"w": w, "flag": flag}, x)


@strategies
def test_a_flag_that_the_loss_holds_is_checked_at_every_trace(strategy):
    class Model:
        flag = False

        def loss(self, w, x):
            return jnp.sum(w * (mix(x) if self.flag else x))

    model = Model()
    grad_fn = clipped_grad(model.loss, clip_norm=1.0, strategy=strategy)
    w, x = jnp.ones(3), normal(ROWS, 3)
    jax.jit(lambda x: grad_fn(w, x).sum)(x)
    model.flag = True
    with pytest.raises(ValueError, match="custom_vmap_call"):
        jax.jit(lambda x: grad_fn(w, x).sum)(x)


# The second is its name since JAX 0.11.
HiPrimitive: Any = getattr(hijax, "VJPHiPrimitive", None) or vars(hijax)["HiPrim"]


class Centred(HiPrimitive):
    """A primitive that under `vmap` takes the mean of all rows away."""

    def __init__(self, kind):
        self.in_avals, self.out_aval, self.params = (kind,), kind, {}
        super().__init__()

    def expand(self, *args):
        return args[0]

    def batch(self, axis_data, args, dims):
        return _mixed(axis_data.size, dims, *args)[0], 0


@strategies
@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("noinline", eqxi.noinline(lambda x: jnp.where(eqxi.unvmap_any(x > 0), -x, x))),
        ("call_hi_primitive", lambda x: Centred(jax.typeof(x))(x)),
        ("empty", lambda x: x + lax.empty(x.shape, x.dtype)),
        ("empty_ref", lambda x: x + jax.empty_ref(jax.typeof(x))[...]),
    ],
)
def test_what_hides_how_it_meets_other_rows_is_refused(name, hidden, strategy):
    with pytest.raises(ValueError, match=f"loss uses {name}, which"):
        clip(
            lambda w, x: jnp.sum(w * hidden(x)), jnp.ones(3), normal(ROWS, 3), strategy
        )


def accumulate(x, out, memory):
    memory[...] = jnp.nan_to_num(memory[...]) + x[...]
    out[...] = memory[...]


def test_scratch_memory_of_a_kernel_takes_nothing_to_the_next_row():
    kernel = pallas.pallas_call(
        accumulate,
        out_shape=jax.ShapeDtypeStruct((3,), jnp.float32),
        scratch_shapes=[tpu.VMEM((3,), jnp.float32)],
        interpret=True,
    )
    grad_fn = clipped_grad(lambda w, x: jnp.sum(w * kernel(x)), clip_norm=1.0)
    w, x = jnp.ones(3), normal(ROWS, 3)
    assert "pallas_call needs examples one at a time" in str(grad_fn.explain(w, x))
    np.testing.assert_allclose(grad_fn(w, x).norms, jnp.linalg.norm(x, axis=1), 1e-5)


class Switch:
    def __init__(self, on):
        self.on = on

    def __eq__(self, other):  # so that Python gives it no hash
        return self is other

    def __bool__(self):
        return self.on


def test_a_flag_that_has_no_hash_is_checked_at_every_trace():
    grad_fn = clipped_grad(
        lambda p, x: jnp.sum(p["w"] * (mix(x) if p["flag"] else x)), clip_norm=1.0
    )
    x = normal(ROWS, 3)

    def traced(switch):
        return jax.jit(lambda w: grad_fn({"w": w, "flag": switch}, x).sum)(jnp.ones(3))

    switch = Switch(False)
    traced(switch)
    switch.on = True
    with pytest.raises(ValueError, match="custom_vmap_call"):
        traced(switch)


@jax.custom_jvp
def gate(y, w):
    return y


def _gate(values, changes):
    still = any(type(change) is SymbolicZero for change in changes)
    return values[0], jnp.zeros_like(values[0]) if still else changes[0]


gate.defjvp(_gate, symbolic_zeros=True)


def gated(w, x):
    return jnp.sum(gate(jnp.tanh(w * x), w))


def padded_by_a_parameter(w, x):
    return jnp.sum(jnp.tanh(lax.pad(w * x, w[0], [(1, 1, 0)])))


def solved(w, x):
    # Its transpose is not given: it takes 2 + w² for a value of its own.
    def inverse(_, x):
        return x / (2 + w**2)

    y = lax.custom_linear_solve(lambda v: (2 + w**2) * v, x, inverse, inverse)
    return jnp.sum(y)


def remembered(w, x):
    memory = jax.new_ref(jnp.zeros(3))
    memory[...] = w * x
    return jnp.sum(jnp.tanh(memory[...]))


def remembered_in_the_memory_of_data(w, x):
    memory = jax.new_ref(x)
    memory[...] += w
    return jnp.sum(jnp.tanh(w * memory[...]))


def remembered_by_a_loop(w, x):
    memory = jax.new_ref(x)

    def step(number, _):
        memory[...] += number * w
        return 0

    lax.fori_loop(0, 3, step, 0)
    return jnp.sum(jnp.tanh(memory[...]))


@strategies
@pytest.mark.parametrize(
    "loss",
    [
        *(gated, padded_by_a_parameter, solved, remembered),
        *(remembered_in_the_memory_of_data, remembered_by_a_loop),
    ],
)
def test_derivatives_that_are_not_those_of_one_operand_after_the_other(loss, strategy):
    w, x = jnp.ones(3), normal(ROWS, 3)
    grad_fn = clipped_grad(loss, clip_norm=1e3, strategy=strategy)
    expected = added(loss, w, x)
    assert np.linalg.norm(expected) > 0.1 or loss is gated
    np.testing.assert_allclose(grad_fn(w, x).sum, expected, rtol=1e-5, atol=1e-6)
    assert grad_fn.explain(w, x).strategy == "per_example"


def test_checkpointed_loops_have_their_gradients():
    def loss(w, x):
        def turn(carry, _):
            return jnp.tanh(w * carry), None

        return eqxi.scan(turn, x, None, length=8, kind="checkpointed")[0].sum()

    w, x = jnp.ones(3), normal(ROWS, 3)
    expected = added(loss, w, x)
    assert np.linalg.norm(expected) > 0.1
    found = clip(loss, w, x, "bk", clip_norm=1e3)
    np.testing.assert_allclose(found.sum, expected, rtol=1e-5, atol=1e-6)


@strategies
def test_while_loops_that_no_gradient_passes(strategy):
    def loss(w, x):
        def turn(state):
            return state[0] + 1, 0.9 * state[1] + w * x

        end = lax.while_loop(lambda state: state[0] < 10, turn, (0, x))[1]
        return jnp.sum(w * x * lax.stop_gradient(end))

    w, x = jnp.ones(3), normal(ROWS, 3)
    found = clip(loss, w, x, strategy, clip_norm=1e4)
    np.testing.assert_allclose(found.sum, added(loss, w, x), rtol=1e-4)


def test_numbers_of_a_poisson_law_whose_rate_is_learned():
    keys = jax.random.split(jax.random.key(0), ROWS)
    batch = {"key": keys, "x": normal(ROWS, 3)}

    def loss(w, example):
        count = jax.random.poisson(example["key"], jnp.exp(w))
        return jnp.sum(w * example["x"] * count.astype(jnp.float32))

    w = jnp.ones(3)
    found, expected = (clip(loss, w, batch, name) for name in ("bk", "per_example"))
    np.testing.assert_allclose(found.sum, expected.sum, rtol=1e-5)


@strategies
def test_a_loss_of_parameters_alone_beside_keys(strategy):
    batch = {"a": jax.random.split(jax.random.key(0), ROWS), "x": normal(ROWS, 3)}

    def loss(w, example):
        jax.debug.callback(lambda x: None, example["x"])
        return jnp.sum(w**2)

    for each in (lambda w, _: jnp.sum(w**2), loss):
        found = clip(each, jnp.ones(3), batch, strategy)
        np.testing.assert_allclose(found.sum, ROWS / np.sqrt(3), rtol=1e-5)
