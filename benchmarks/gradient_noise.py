"""Compare the sampling noise that a run predicts with that of held-out batches.

    python benchmarks/gradient_noise.py [--data CIFAR10_DIR] [--steps 200]

Three networks are trained without a guarantee. `Norms.mean_square` of the last tenth of
a run predicts the variance of a Poisson sum of clipped gradients at other batch sizes.
At the last parameters it is measured over batches of test images.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import tanager
from tanager import models
from tanager.data import load, subset
from tanager.models.vit import Variant, VisionTransformer
from tanager.sampling import PoissonSampler
from tanager.training.norms import Norms


Shape = tuple[int, int, int]
NETWORKS: dict[str, Callable[[Shape], Any]] = {
    "small-cnn": lambda shape: named("small-cnn", shape),
    "wrn-10-1": lambda shape: named("wrn-10-1", shape),
    "ViT of width 32, depth 3": lambda shape: VisionTransformer(
        Variant(32, 3, 4), shape[0] // 4, 10, shape, key=jax.random.key(0)
    ),
}


def named(name: str, shape: Shape) -> Any:
    """Return a network of the zoo for ten classes."""
    return models.create(name, classes=10, image_shape=shape, key=jax.random.key(0))


def loss(model: Any, example: Any) -> jax.Array:
    """Return the cross-entropy of one example."""
    logits = model(example["image"].astype(jnp.float32) / 127.5 - 1)
    label = example["label"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def run(model: Any, data: Any, batch_size: int, clip_norm: float, **more: Any):
    """Train without a guarantee; return the model, and its norms in ten parts."""
    options: dict[str, Any] = {"steps": 200, "learning_rate": 0.5} | more
    mechanism = tanager.Mechanism(batch_size / len(data), 0.1, options["steps"])
    with tempfile.TemporaryDirectory() as folder:
        found = tanager.train(
            tanager.Problem(loss, model, data),
            tanager.DPSGD(
                mechanism,
                optax.sgd(options["learning_rate"]),
                delta=1e-5,
                clip_norm=clip_norm,
            ),
            tanager.Runtime(physical_batch_size=batch_size, progress=False),
            out=folder,
            seed=1,
        )
        norms = Norms.read(folder, 10)
    return found.params, norms


def clipped(model: Any, data: Any, clip_norm: float) -> np.ndarray:
    """Return the clipped gradient of each example, float32[n, d]."""
    grad_fn = tanager.clipped_grad(loss, clip_norm=clip_norm, strategy="per_example")

    @jax.jit
    def one(example: Any) -> jax.Array:
        rows = jax.tree.map(lambda leaf: leaf[None], example)
        sums = jax.tree.leaves(grad_fn(model, rows, jnp.ones(1, bool)).sum)
        return jnp.concatenate([leaf.ravel() for leaf in sums])

    return np.stack([one(data[number]) for number in range(len(data))])


def variance(
    gradients: np.ndarray, batch_size: int, batches: int
) -> tuple[float, float]:
    """Return the variance of a Poisson sum, over its batches, and its standard error.

    The variances of all coordinates are added.
    """
    count = len(gradients)
    mechanism = tanager.Mechanism(batch_size / count, 1.0, batches)
    sampler = PoissonSampler(mechanism, count, tanager.Seed.from_int(1))
    drawn = np.zeros((batches, count), np.float32)
    for step, row in enumerate(drawn):
        row[sampler.indices(step)] = 1
    sums = drawn @ gradients
    apart = np.sum((sums - sums.mean(axis=0)) ** 2, axis=1) * batches / (batches - 1)
    return float(apart.mean()), float(apart.std(ddof=1) / batches**0.5)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--clip-norms", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--batch-size", type=int, default=64, help="of the run")
    parser.add_argument("--others", type=int, nargs="+", default=[16, 128])
    given = parser.parse_args()
    name = "cifar10" if given.data else "digits"
    dataset = load(name, given.data, train_examples=5000 if given.data else None)
    test = subset(dataset.test, np.arange(min(1000, len(dataset.test))))
    for title, network in NETWORKS.items():
        for clip_norm in given.clip_norms:
            high, wide, channels = dataset.image_shape
            model = network((high, wide, channels))
            size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
            model, norms = run(
                model, dataset.train, given.batch_size, clip_norm, steps=given.steps
            )
            last = dataclasses.replace(norms, counts=norms.counts[-1:])
            gradients = clipped(model, test, clip_norm)
            for batch_size in given.others:
                rate = batch_size / len(test)
                bound = batch_size * clip_norm**2 * (1 - rate)
                found, error = variance(gradients, batch_size, 400)
                print(
                    f"| {title} ({size}) | {clip_norm:g} | {batch_size} | "
                    f"{last.mean_square():.3f} | {found / bound:.3f} ± "
                    f"{error / bound:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
