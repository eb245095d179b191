"""Does correlated noise help? DP-SGD and banded matrix factorisation at equal ε.

    python3 -m venv mf && mf/bin/pip install jax-privacy scikit-learn
    mf/bin/python benchmarks/matrix_factorisation.py digits --seeds 50
    mf/bin/python benchmarks/matrix_factorisation.py FOLDER

FOLDER holds train.npy and test.npy (features, one row an image), train-labels.npy and
test-labels.npy. A linear layer is trained. With b bands, step t draws from part t mod b
of the data at rate b·q, and ε is that of T/b steps of DP-SGD at that rate
(Choquette-Choo et al. 2023, theorem 4; b = 1 is DP-SGD). Learning rate and momentum are
chosen for each row on held-out training examples; the test examples are looked at last,
with other seeds.
"""

import argparse
import itertools
import math
from pathlib import Path

import dp_accounting
import jax
import numpy as np
from dp_accounting.pld import PLDAccountant
from jax_privacy.matrix_factorization import toeplitz


Data = tuple[np.ndarray, np.ndarray]

SETTINGS = {  # ε, δ, held out, [(batch size, steps)]
    "digits": (3.0, 1e-4, 250, [(64, 16), (64, 160), (256, 80)]),
    "features": (1.0, 1e-5, 5000, [(1024, 44), (1024, 352), (4096, 88)]),
}
RATES = [0.25, 1.0, 4.0, 16.0, 64.0]


def digits() -> tuple[Data, Data]:
    """Return scikit-learn's digits, cut in order: 1250 to train, 547 to test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:1250], y[:1250]), (x[1250:], y[1250:])


def features(folder: Path) -> tuple[Data, Data]:
    """Return cached features and labels."""
    train, test = (
        (np.load(folder / f"{part}.npy"), np.load(folder / f"{part}-labels.npy"))
        for part in ("train", "test")
    )
    return train, test


def scaled(data: Data) -> Data:
    """Return roots of features, each row of norm 1."""
    x = np.sqrt(np.maximum(data[0].astype(np.float32), 0))
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6), data[1]


def noise_multiplier(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    """Return σ of DP-SGD, by PLD under add-or-remove-one."""

    def event(sigma: float) -> dp_accounting.DpEvent:
        one = dp_accounting.GaussianDpEvent(sigma)
        if rate < 1:
            one = dp_accounting.PoissonSampledDpEvent(rate, one)
        return dp_accounting.SelfComposedDpEvent(one, rounds)

    return dp_accounting.calibrate_dp_mechanism(
        lambda: PLDAccountant(value_discretization_interval=1e-3),
        event,
        epsilon,
        delta,
        dp_accounting.ExplicitBracketInterval(0.2, 100.0),
        tol=1e-3,
    )


def train(
    data: Data,
    batch: int,
    steps: int,
    bands: np.ndarray,
    sigma: float,
    rate: float,
    momentum: float,
    seed: int,
) -> np.ndarray:
    """Return the weights; clipping norm 1."""
    (x, y), draw = data, np.random.default_rng(seed)
    classes, count = int(y.max()) + 1, len(bands)
    parts = np.array_split(draw.permutation(len(x)), count)
    weights = np.zeros((x.shape[1], classes), np.float32)
    velocity = np.zeros_like(weights)
    before: list[np.ndarray] = []  # correlated noise of the last steps, newest first
    for step in range(steps):
        part = parts[step % count]
        rows = part[draw.random(len(part)) < batch / len(part)]
        logits = x[rows] @ weights
        wrong = np.exp(logits - logits.max(1, keepdims=True))
        wrong /= wrong.sum(1, keepdims=True)
        wrong[np.arange(len(rows)), y[rows]] -= 1
        wrong /= np.maximum(np.linalg.norm(wrong, axis=1, keepdims=True), 1)  # ‖x‖ = 1
        noise = draw.standard_normal(weights.shape, np.float32)
        for coefficient, old in zip(bands[1:], before, strict=False):
            noise -= coefficient * old
        noise /= bands[0]
        before = [noise, *before[: count - 2]] if count > 1 else []
        velocity = momentum * velocity + (x[rows].T @ wrong + sigma * noise) / batch
        weights -= rate * velocity
    return weights


def accuracy(weights: np.ndarray, data: Data) -> float:
    """Return the share of examples that weights classify rightly."""
    return float(np.mean(np.argmax(data[0] @ weights, 1) == data[1]))


def main() -> None:
    """Print a row for each batch size, number of steps and number of bands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="digits, or a folder of features")
    parser.add_argument("--bands", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seeds", type=int, default=3, help="on the test examples")
    parser.add_argument("--seeds-to-choose", type=int, default=1)
    asked = parser.parse_args()
    own = asked.data == "digits"
    given, test = map(scaled, digits() if own else features(Path(asked.data)))
    epsilon, delta, held, regimes = SETTINGS["digits" if own else "features"]
    order = np.random.default_rng(0).permutation(len(given[0]))
    fit, validation = (
        (given[0][rows], given[1][rows]) for rows in (order[held:], order[:held])
    )
    examples = len(fit[0])
    seeds = range(1, asked.seeds + 1)
    print(f"ε = {epsilon}, δ = {delta}, {examples} examples, jax {jax.__version__}")
    print("| batch | steps | epochs | bands | σ | rate, momentum | accuracy |")
    print("|---|---|---|---|---|---|---|")
    counts: list[int] = asked.bands
    for (batch, steps), count in itertools.product(regimes, counts):
        if count * batch > examples or count > steps:
            continue
        parts = examples // count  # the smallest part has the highest rate
        rounds = math.ceil(steps / count)
        sigma = noise_multiplier(epsilon, delta, batch / parts, rounds)
        bands = np.ones(1)
        if count > 1:
            bands = np.asarray(toeplitz.optimize_banded_toeplitz(steps, count))
        of = batch, steps, bands.astype(np.float32), sigma
        turns = [1000 * turn for turn in range(asked.seeds_to_choose)]
        best = max(
            itertools.product(RATES, (0.0, 0.9)),
            key=lambda choice: sum(
                accuracy(train(fit, *of, *choice, seed), validation) for seed in turns
            ),
        )
        found = [accuracy(train(fit, *of, *best, s), test) for s in seeds]
        shown = f"{100 * np.mean(found):.1f} ± {100 * np.std(found, ddof=1):.1f} %"
        chosen = f"{best[0]:g}, {best[1]:g}"
        epochs = batch * steps / examples
        print(
            f"| {batch} | {steps} | {epochs:.1f} | {count} | {sigma:.2f} | {chosen} "
            f"| {shown} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
