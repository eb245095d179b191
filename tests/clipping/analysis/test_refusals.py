"""Losses that have no per-example gradients, and are refused by name."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from oracle import curve

from tanager.clipping import clipped_grad


@jax.custom_batching.custom_vmap
def centred(x):
    return x


@centred.def_vmap
def _(axis_size, in_batched, x):
    return x - jnp.mean(x, axis=0, keepdims=True), True


def drawn(x):
    return x + lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)


def reported(x):
    io_callback(lambda _: None, None, x)
    return x


def with_scan(function):
    def apply(x):
        return lax.scan(lambda carry, _: (jax.jit(function)(carry), None), x, None, 2)[
            0
        ]

    return apply


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, with_scan, jax.checkpoint])
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (centred, "custom_vmap_call"),
        (drawn, "rng_uniform"),
        (reported, "io_callback"),
        (jax.custom_jvp(centred), "custom_vmap_call"),
    ],
)
def test_what_makes_per_example_gradients_ill_defined_is_refused(function, name, wrap):
    if wrap is jax.checkpoint and function is reported:
        pytest.skip("JAX itself has no checkpoint of effects")
    if isinstance(function, jax.custom_jvp):
        function.defjvp(lambda p, t: (centred(p[0]), t[0]))

    def loss(w, x):
        return curve(w * wrap(function)(x))

    grad_fn = clipped_grad(loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=f"loss uses {name}, which.*remove it from"):
        grad_fn(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "name",
    [
        "buffer_callback",
        "call_hi_primitive",
        "empty",
        "empty_ref",
        "noinline",
        "pure_callback",
        "stochastic_convert_element_type",
    ],
)
def test_operations_are_refused_by_name(name):
    operation = jex.Primitive(name)
    operation.def_abstract_eval(lambda x: x)
    for call in (operation.bind, jax.jit(operation.bind)):
        grad_fn = clipped_grad(lambda w, x, f=call: curve(w * f(x)), clip_norm=1.0)
        with pytest.raises(ValueError, match=f"loss uses {name}, which"):
            grad_fn(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "mix", [lax.pmean, lax.psum, lax.pmax, lax.all_gather, lax.axis_index]
)
def test_collectives_over_examples_are_refused(mix):
    def loss(w, x):
        both = mix("batch") if mix is lax.axis_index else mix(x, "batch")
        return jnp.sum(w) * jnp.sum(both.astype(x.dtype))

    with pytest.raises(ValueError, match="must not mix examples"):
        clipped_grad(loss, clip_norm=1.0)(jnp.ones(3), jnp.ones((2, 3)))


def test_complex_parameters_are_refused():
    grad_fn = clipped_grad(lambda w, x: jnp.sum(jnp.abs(w * x)), clip_norm=1.0)
    with pytest.raises(ValueError, match="params must be real"):
        grad_fn(jnp.ones(3, jnp.complex64), jnp.ones((2, 3)))
