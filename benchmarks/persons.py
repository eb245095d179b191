"""Measure what it costs to protect persons instead of images, at one ε.

    python benchmarks/persons.py [--data CIFAR10_DIR] [--epsilon 3] [--seeds 3]

Images get owners at random, of 1 to 9 images each. A small network is trained on the
digits, and with --data a linear layer on 2048 public random features of CIFAR-10.
Prints the accuracy of the parameter average on the test images, of every seed; settings
are the same for all rows and were not chosen here.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tanager
from tanager import data, models
from tanager.data.augment import standardise
from tanager.privacy.plan import default_delta


_FILTERS, _SIDE = 512, 6


def owners_of(examples: int) -> np.ndarray:
    """Return random owners of 1 to 9 examples each."""
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 10, examples)
    return draw.permutation(np.repeat(np.arange(examples), sizes)[:examples])


def features(images: np.ndarray) -> np.ndarray:
    """Return float32[n, 4·filters]: pooled responses to random patches, norm 1."""
    shape = (_FILTERS, images.shape[-1], _SIDE, _SIDE)
    filters = jax.random.normal(jax.random.key(0), shape)
    filters -= filters.mean((1, 2, 3), keepdims=True)
    filters /= jnp.linalg.norm(filters.reshape(_FILTERS, -1), axis=1)[
        :, None, None, None
    ]

    @jax.jit
    def of_batch(batch):
        pixels = jnp.moveaxis(batch.astype(jnp.float32), -1, 1)
        pixels -= pixels.mean((1, 2, 3), keepdims=True)
        pixels /= pixels.std((1, 2, 3), keepdims=True) + 1e-3
        maps = jax.nn.relu(jax.lax.conv(pixels, filters, (1, 1), "VALID") - 0.5)
        half = maps.shape[-1] // 2
        quarters = [
            maps[:, :, rows, columns].mean((2, 3))
            for rows in (slice(half), slice(half, None))
            for columns in (slice(half), slice(half, None))
        ]
        found = jnp.concatenate(quarters, 1)
        found -= found.mean(1, keepdims=True)
        return found / jnp.linalg.norm(found, axis=1, keepdims=True)

    parts = np.array_split(images, max(1, len(images) // 500))
    return np.concatenate([np.asarray(of_batch(part)) for part in parts])


def everything(source: data.Source) -> Any:
    """Return all examples of a source, stacked."""
    return data.gather(source, np.arange(len(source)))


def digits() -> tuple[Any, ...]:
    """Return examples, test examples, classes, model, logits, and settings."""
    loaded = data.load("digits")

    def predict(model, example):
        return model(standardise(example["image"], loaded.mean, loaded.std))

    def model(seed):
        shape, key = loaded.image_shape, jax.random.key(seed)
        return models.create("small-cnn", classes=10, image_shape=shape, key=key)

    train, test = (everything(source) for source in (loaded.train, loaded.test))
    return train, test, loaded.classes, model, predict, 0.5


def cifar10(folder: str) -> tuple[Any, ...]:
    """Return the same for features of CIFAR-10."""
    loaded = data.load("cifar10", folder)
    halves = []
    for source in (loaded.train, loaded.test):
        half = everything(source)
        halves.append({**half, "image": features(half["image"])})

    def predict(weights, example):
        return example["image"] @ weights["w"] + weights["b"]

    def model(seed):
        return {"w": jnp.zeros((halves[0]["image"].shape[1], 10)), "b": jnp.zeros(10)}

    return *halves, loaded.classes, model, predict, 16.0


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="folder of CIFAR-10")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    tasks: dict[str, Callable[[], tuple[Any, ...]]] = {"digits": digits}
    if options.data:
        tasks["CIFAR-10, features"] = lambda: cifar10(options.data)
    for name, task in tasks.items():
        train, test, classes, model, predict, rate = task()
        delta = default_delta(len(train["label"]))

        def loss(params, example, predict=predict):
            logits, label = predict(params, example), example["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label)

        owners = owners_of(len(train["label"]))
        rows = {"image": train}
        for most in (1, 4, 9):
            rows[f"person, k = {most}"] = tanager.Grouped(train, owners, most)
        for unit, examples in rows.items():
            grouped = unit != "image"
            size = len(examples.groups) if grouped else len(owners)
            mechanism = tanager.calibrate(
                epsilon=options.epsilon,
                delta=delta,
                sample_rate=512 / 1437 if name == "digits" else 0.1,
                steps=options.steps,
            )
            found = []
            for seed in range(options.seeds):
                result = tanager.train(
                    tanager.Problem(loss, model(seed), examples),
                    tanager.DPSGD(
                        mechanism, optax.sgd(rate), delta=delta, ema_decay=0.95
                    ),
                    tanager.Runtime(physical_batch_size=128, progress=False),
                    evaluate=tanager.Classification(predict, test, classes),
                    evaluate_every=options.steps,
                )
                assert result.evaluation_ema is not None
                found.append(100 * result.evaluation_ema.accuracy)
            each = ", ".join(f"{accuracy:.1f}" for accuracy in found)
            print(
                f"{name:20} ε = {options.epsilon:g} per {unit:16} N = {size:6} "
                f"δ = {delta:g} σ = {mechanism.noise_multiplier:.3f}  "
                f"{statistics.mean(found):.1f} % ({each})",
                flush=True,
            )


if __name__ == "__main__":
    main()
