"""Say how many private models `tanager audit --method membership` trains in a minute.

    python benchmarks/many_models.py [--models 16] [--steps 20] [--rounds 3]

LeNet on 28×28 images and an MLP of 32 hidden units on 8×8 ones, 101 random examples,
expected batch 64. Rates are for models of 100 updates. Compiling is not counted.
"""

import argparse
import time

import jax
import numpy as np
import optax

from tanager import Mechanism, Seed
from tanager.audit.many_models import ManyModels, with_rates
from tanager.models.small import MLP, LeNet
from tanager.training.problem import DPSGD, Problem


EXAMPLES = 101


def loss(model, example):
    """Return the cross-entropy of one example."""
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(model(image), label)


def seconds(model, shape: tuple[int, ...], arguments: argparse.Namespace) -> float:
    """Return the median time in which the models are trained side by side."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(EXAMPLES, *shape)).astype(np.float32)
    labels = rng.integers(0, 10, EXAMPLES).astype(np.int32)
    algorithm = DPSGD(
        Mechanism(64 / EXAMPLES, 1.0, arguments.steps),
        with_rates(optax.sgd),
        delta=1e-3,
    )
    many = ManyModels(Problem(loss, model, (images, labels)), algorithm)
    count = arguments.models
    secrets = [Seed.from_int(number) for number in range(count)]
    given = secrets, np.full(count, 0.5), np.zeros((count, EXAMPLES), bool)
    jax.block_until_ready(many.train(*given))
    times = []
    for _ in range(arguments.rounds):
        start = time.perf_counter()
        jax.block_until_ready(many.train(*given))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    key = jax.random.key(0)
    for name, model, shape in (
        ("lenet", LeNet(10, (28, 28, 1), key=key), (28, 28, 1)),
        ("mlp-32", MLP(10, (8, 8, 1), hidden=(32,), key=key), (8, 8, 1)),
    ):
        taken = seconds(model, shape, arguments)
        each = taken / arguments.steps / arguments.models
        print(
            f"{name}: {1e3 * each:.2f} ms an update, {0.6 / each:.0f} models a minute"
        )


if __name__ == "__main__":
    main()
