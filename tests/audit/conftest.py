import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parts import parts
from tanager.audit.white_box import audit_white_box
from tanager.privacy.mechanism import Mechanism


CLAIMED = Mechanism(0.1, 0.8, 40)


def loss(params, example):
    """Least squares: the smallest thing that trains."""
    x, y = example
    return (jnp.dot(params["w"], x) + params["b"] - y) ** 2


@pytest.fixture(scope="session")
def regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    return x, x.sum(1)


@pytest.fixture(scope="session")
def white_box(regression):
    """Audit least squares: `white_box(mechanism=…, canaries=…, …)`."""

    def audit(mechanism=CLAIMED, canaries=600, data=regression, **options):
        params = {"w": jnp.zeros(5), "b": jnp.zeros(())}
        options = {"seed": 1, "physical_batch_size": 32, "strategy": "bk"} | options
        own = {"loss": loss, "params": params, "data": data, "mechanism": mechanism}
        still = {"optimizer": optax.set_to_zero()}
        problem, algorithm, runtime, rest = parts(still | own | options)
        return audit_white_box(problem, algorithm, runtime, canaries=canaries, **rest)

    return audit
