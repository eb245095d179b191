"""Try settings for a linear layer on scattering features, on a part of CIFAR-10.

    python benchmarks/automatic.py --data DIR [--per-class 320] [--classes 0 1 2]

Both halves are training images; the test images are not read. Full-batch DP-SGD
with momentum 0.9 is simulated through the Gram matrix of the features, which gives the
same logits and is much faster. Prints held-out accuracies by ε, steps T, clipping norm
C, and learning rate in units of N·ε / (80 · √features). One draw of noise.
"""

import argparse
import itertools

import jax
import numpy as np

import tanager
from tanager import data
from tanager.models.scattering import normalise, scatter
from tanager.privacy.plan import default_delta


EPSILONS = (1.0, 4.0, 8.0)
SETTINGS = ((60, 1.0, 1), (60, 0.1, 4), (60, 0.1, 8), (60, 0.1, 16), (150, 0.1, 4))
HELD_OUT = 100


def features(images: np.ndarray) -> np.ndarray:
    """Return scattering features of norm 1."""
    scattered = jax.jit(jax.vmap(lambda image: normalise(scatter(image / 127.5 - 1))))
    blocks = [images[i : i + 250] for i in range(0, len(images), 250)]
    found = [np.asarray(scattered(block.astype(np.float32))) for block in blocks]
    rows = np.concatenate([block.reshape(len(block), -1) for block in found])
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def accuracy(
    gram: np.ndarray,
    root: np.ndarray,
    labels: tuple[np.ndarray, np.ndarray],
    noise: float,
    setting: tuple[int, float, float],
) -> float:
    """Return the held-out accuracy of one run; `noise` is σ of a single step."""
    (steps, clip, rate), (train, held) = setting, labels
    draw, size, classes = np.random.default_rng(0), len(train), int(train.max()) + 1
    logits = np.zeros((len(gram), classes), np.float32)
    velocity, wanted = np.zeros_like(logits), np.eye(classes)[train]
    for _ in range(steps):
        shifted = np.exp(logits[:size] - logits[:size].max(1, keepdims=True))
        errors = shifted / shifted.sum(1, keepdims=True) - wanted
        norms = np.linalg.norm(errors, axis=1, keepdims=True)
        errors *= np.minimum(1 / clip, 1 / np.maximum(norms, 1e-12))
        hidden = noise * steps**0.5 * draw.standard_normal(logits.shape)
        velocity = 0.9 * velocity + (gram[:, :size] @ errors + root @ hidden) / size
        logits -= rate * velocity
    return float(np.mean(logits[size:].argmax(1) == held))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--per-class", type=int, default=320)
    parser.add_argument("--classes", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    source = data.load("cifar10", options.data).train
    rows = [source[i] for i in range(len(source))]
    labels = np.array([row["label"] for row in rows])
    draw, halves = np.random.default_rng(0), ([], [])
    for number in options.classes:
        order = draw.permutation(np.flatnonzero(labels == number))
        halves[0].extend(order[: options.per_class])
        halves[1].extend(order[options.per_class :][:HELD_OUT])
    chosen = [*halves[0], *halves[1]]
    seen = features(np.stack([rows[i]["image"] for i in chosen]))
    gram = seen @ seen.T
    root = np.linalg.cholesky(gram + 1e-5 * np.eye(len(gram)))
    places = np.searchsorted(options.classes, labels[chosen])
    size = len(halves[0])
    for epsilon, (steps, clip, factor) in itertools.product(EPSILONS, SETTINGS):
        once = tanager.calibrate(
            epsilon=epsilon, delta=default_delta(size), sample_rate=1.0, steps=1
        )
        rate = factor * size * epsilon / (80 * seen.shape[1] ** 0.5)
        found = accuracy(
            gram,
            root,
            (places[:size], places[size:]),
            once.noise_multiplier,
            (steps, clip, rate),
        )
        print(
            f"ε = {epsilon:g}, T = {steps}, C = {clip}, ×{factor}: {100 * found:.1f} %"
        )


if __name__ == "__main__":
    main()
