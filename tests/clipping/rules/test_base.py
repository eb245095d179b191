"""Equations without a rule of their own, against explicit gradients in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import alone, check, draw, norms_of, read
from rule_cases import BOTH, ROWS, convolution, curve

from cases import in_full


ELEMENTWISE = {
    "bias": (lambda w, x: x + w, (3,), (3,)),
    "bias at positions": (lambda w, x: x + w[None, :], (3,), (5, 3)),
    "scalar bias": (lambda w, x: x + w, (), (5, 3)),
    "position embedding": (lambda w, x: x + w, (5, 3), (5, 3)),
    "scale": (lambda w, x: x * w[None, :], (3,), (5, 3)),
    "scale of channels": (lambda w, x: x * w[:, None, None], (3,), (3, 4, 2)),
    "divided by": (lambda w, x: x / (3.0 + w[None]), (3,), (5, 3)),
    "divides": (lambda w, x: w[None] / (3.0 + x * x), (3,), (5, 3)),
    "divided by directly": (lambda w, x: jnp.sin(x) / w, (), (5,)),
    "power": (lambda w, x: (1.5 + jnp.sin(x)) ** w, (3,), (3,)),
    "maximum": (lambda w, x: jnp.maximum(x, w[None]), (3,), (5, 3)),
    "selected by data": (
        lambda w, x: jnp.where(x > 0, jnp.broadcast_to(w, x.shape), x),
        (),
        (5, 3),
    ),
    "class token": (lambda w, x: jnp.concatenate([w[None], x]), (3,), (5, 3)),
    "written into data": (lambda w, x: x.at[2].set(w), (3,), (5, 3)),
    "subtracted": (lambda w, x: w[None] - x, (3,), (5, 3)),
    "nonlinear before data": (
        lambda w, x: x * jax.nn.softplus(w)[None],
        (3,),
        (5, 3),
    ),
    "triangular solve": (
        lambda w, x: jax.scipy.linalg.solve_triangular(
            jnp.tril(w) + 3.0 * jnp.eye(3, dtype=w.dtype), x, lower=True
        ),
        (3, 3),
        (3,),
    ),
}


def test_elementwise_and_other_equations():
    """All in one loss: each has parameters, data and a group of its own."""
    w, x = {}, {}
    for name, (_, weight, data) in ELEMENTWISE.items():
        w[name], x[name] = draw(4, weight, (ROWS, *data))

    def loss(w, x):
        each = ELEMENTWISE.items()
        return sum(curve(apply(w[name], x[name])) for name, (apply, *_) in each)

    assert len(read(loss, w, x)[1]) == len(ELEMENTWISE)
    check(loss, w, x, methods=True)


def test_group_normalisation_with_scale_and_bias():
    scale, bias, x = draw(5, (4,), (4,), (ROWS, 3, 3, 4))

    def loss(params, x):
        grouped = x.reshape(9, 2, 2)
        mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
        variance = jnp.var(grouped, axis=(0, 2), keepdims=True)
        normal = ((grouped - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        return curve(normal * params["scale"] + params["bias"])

    def strict(params, x):
        wide = {k: v[None, None, :] for k, v in params.items()}
        return loss(wide, x)

    params = {"scale": scale, "bias": bias}
    check(strict, params, x, methods=True, dtypes=BOTH)


def own_standardisation(w):
    centred = w - jnp.mean(w, axis=(0, 1, 2), keepdims=True)
    return centred * lax.rsqrt(jnp.var(w, axis=(0, 1, 2), keepdims=True) + 0.05)


REPARAMETRISED = {
    "own weight standardisation": lambda p: own_standardisation(p["w"]),
    "weight norm": lambda p: (
        p["g"][None, None, None] * p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2))
    ),
    "low rank adaptation": lambda p: p["w"] + (p["a"] @ p["b"]).reshape(p["w"].shape),
    "spectral norm": lambda p: (
        p["w"] / (p["u"] @ p["w"].reshape(18, 3) @ p["w"].reshape(18, 3).T @ p["u"])
    ),
    "fast Fourier transform": lambda p: jnp.fft.irfft(
        jnp.fft.rfft(p["w"], axis=0) * 0.5, n=3, axis=0
    ),
    "concatenation": lambda p: jnp.concatenate([p["w"][:2], p["w"][:1] * 2.0]),
    "symmetrised": lambda p: p["w"] + p["w"][::-1],
}


# Those of `make test-full` are in `test_recognised` too.
MORE = "own weight standardisation", "weight norm"


@pytest.mark.parametrize("name", in_full(REPARAMETRISED, *MORE))
def test_weights_made_of_parameters(name):
    apply, w, x = convolution("same")
    a, b, g, u = draw(11, (18, 2), (2, 3), (3,), (18,))
    params = {"w": w, "a": a, "b": b, "g": g, "u": u}
    make = REPARAMETRISED[name]
    check(lambda p, x: curve(apply(make(p), x)), params, x, methods=True)


def test_parameters_in_a_complex_transform_of_data():
    # A layer of a Fourier neural operator: complex weights are two real arrays.
    real, imaginary, x = draw(12, (3, 2, 4), (3, 2, 4), (ROWS, 4, 2))

    def loss(params, x):
        modes = jnp.fft.rfft(x, axis=0)
        weights = lax.complex(*params)
        weights = weights * (0.5 + 0.5j)
        mixed = jnp.einsum("ki,kio->ko", modes, weights)
        return curve(jnp.fft.irfft(mixed * weights[:, 0] / 2, n=4, axis=0))

    check(loss, (real, imaginary), x, methods=True)


def test_a_parameter_that_is_cast_to_complex_numbers():
    def loss(w, x):
        return jnp.sum(jnp.abs(w.astype(jnp.complex64) + lax.complex(x, x)) ** 3)

    w, x = (jnp.float32(each) for each in draw(5, (4, 4), (3, 4, 4)))
    exact = norms_of(loss, w, x, wide=False)
    for sizes, norms in alone(loss, w, x, 1.0).values():
        np.testing.assert_allclose(norms, exact, rtol=1e-5)
        np.testing.assert_allclose(sizes, 1.0, rtol=1e-5)
