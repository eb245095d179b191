"""Train a last layer on the same features here and by Opacus, in turns.

    python benchmarks/peers/last_layer.py --features DIR [--epsilon 1] [--steps 60]
        [--learning-rate 20] [--seeds 1] [--python .venv-opacus/bin/python]

DIR holds what `tanager train … --features DIR` computed. Both make the same full-batch
steps: the same noise multiplier, learning rate, momentum 0.9, clipping norm 1, physical
batches of 4096 and first parameters. Only the noise is each one's own. After a tenth of
the steps the other has its turn, so that a slow minute of the machine slows both.
Seconds include looking at the test examples after each turn, and here compiling, the
ledger and checkpoints. Opacus is given features that are scaled already.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from turns import Other, add_python
from workers import say

from tanager import DPSGD, Classification, Problem, Runtime, calibrate, train
from tanager._heap import keep_freed_memory
from tanager.models.layers import ScaledHead


_ROWS, _MOMENTUM, _TURNS = 4096, 0.9, 10

Arrays = tuple[np.ndarray, np.ndarray]


def read(folder: Path) -> Arrays:
    """Return features and labels that were cached."""
    return np.load(folder / "features.npy"), np.load(folder / "labels.npy")


def predict(head: ScaledHead, example: Any) -> jax.Array:
    """Return the logits of one example."""
    return head(example["features"])


def loss(head: ScaledHead, example: Any) -> jax.Array:
    """Return the cross-entropy of one example."""
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(head, example), example["label"]
    )


def measure(
    training: Arrays, test: Arrays, folder: Path, seed: int, options: Any
) -> dict[str, tuple[float, float]]:
    """Return accuracy and seconds of each, in folder with the scaled features."""
    mechanism = calibrate(
        epsilon=options.epsilon, delta=1e-5, sample_rate=1.0, steps=options.steps
    )
    classes = int(training[1].max()) + 1
    width = training[0].shape[1]
    head = ScaledHead(width, classes, "root", key=jax.random.key(0))
    head = eqx.tree_at(lambda head: head.weight, head, 0 * head.weight)
    opacus = Other(
        options.python,
        "head",
        files={name: str(folder / f"{name}.npz") for name in ("training", "test")},
        noise_multiplier=mechanism.noise_multiplier,
        learning_rate=options.learning_rate,
        momentum=_MOMENTUM,
        rows=_ROWS,
        seed=seed,
    )
    every = max(1, options.steps // _TURNS)
    found = {"tanager": (0.0, 0.0), "Opacus": (0.0, 0.0)}
    made, began = 0, time.perf_counter()

    def take_turns(line: Any) -> None:
        nonlocal made, began
        own = found["tanager"][1] + time.perf_counter() - began
        found["tanager"] = line["test_accuracy"], own
        answer = opacus.turn(steps=line["step"] - made)
        taken = found["Opacus"][1] + answer["seconds"]
        found["Opacus"] = answer["accuracy"], taken
        say(f"step {line['step']}: {own:.1f} s, Opacus {taken:.1f} s")
        made, began = line["step"], time.perf_counter()

    rows = [{"features": x, "label": y} for x, y in (training, test)]
    train(
        Problem(loss, head, rows[0]),
        DPSGD(mechanism, optax.sgd(options.learning_rate, _MOMENTUM), delta=1e-5),
        Runtime(physical_batch_size=_ROWS, progress=False),
        out=folder / f"run-{seed}",
        evaluate=Classification(predict, rows[1], tuple(map(str, range(classes)))),
        evaluate_every=every,
        on_metrics=take_turns,
    )
    opacus.end()
    return found


def main() -> None:
    """Print a line for each seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=1)
    add_python(parser)
    options = parser.parse_args()
    keep_freed_memory()
    training, test = (read(options.features / name) for name in ("training", "test"))
    print("| seed | tanager | Opacus | Opacus' time / tanager's |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        width = training[0].shape[1]
        scale = ScaledHead(width, 2, "root", key=jax.random.key(0)).scaled
        scale = jax.jit(jax.vmap(scale))
        for name, (x, y) in (("training", training), ("test", test)):
            np.savez(Path(folder) / f"{name}.npz", x=np.asarray(scale(x)), y=y)
        for seed in range(1, options.seeds + 1):
            found = measure(training, test, Path(folder), seed, options)
            cells = [f"{100 * a:.1f} %, {s:.1f} s" for a, s in found.values()]
            ratio = found["Opacus"][1] / found["tanager"][1]
            print(f"| {seed} | {' | '.join(cells)} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
