"""Training moves arrays to devices, also where its caller forbids it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tanager


def loss(params, example):
    return jnp.sum((params["w"] - example["x"]) ** 2)


def test_a_caller_may_forbid_transfers():
    params = {"w": jnp.zeros(3)}
    data = {"x": np.ones((40, 3), np.float32)}
    problem = tanager.Problem(loss, params, data)
    mechanism = tanager.Mechanism(0.5, 1.0, 3)
    algorithm = tanager.DPSGD(mechanism, optax.sgd(0.1), delta=1e-3)
    with jax.transfer_guard("disallow"):
        result = tanager.train(problem, algorithm, tanager.Runtime(progress=False))
    assert np.isfinite(result.params["w"]).all()


COMMAND = """
from tanager import cli

def main():
    import jax.numpy as jnp
    import numpy as np

    return int(jnp.add(np.full(1, 3), 4)[0])  # moved unasked, as commands do

cli.main = main
cli.process()
"""


def test_so_may_the_environment_of_the_command():
    """It allows them before JAX is imported, whatever the command does then."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND],
        env=os.environ | {"JAX_TRANSFER_GUARD": "disallow"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
