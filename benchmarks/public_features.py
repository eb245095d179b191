"""Train last layers on fixed features of CIFAR-10, at several ε, sizes and seeds.

    python benchmarks/public_features.py --data DIR [--out DIR] [--sizes] [--plot FILE]

Runs two recipes on public features, and one without public images, as they are, each
seed a run of its own with a secret seed; `--sizes` runs them on 1,000 and 5,000 images
too. Prints each command before it is run, and in the end a table as Markdown: mean ±
standard deviation. Killed at any moment, the same command goes on. Features are
computed once.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path

import epsilon_axis
from trained import heading, trained


EPSILONS = (1, 2, 4, 8)
LOOKS = {
    "cifar10-efficientnet-lite0": ("EfficientNet-Lite0, 2 cores", "#0072b2", "o"),
    "cifar10-efficientnet-lite2": ("EfficientNet-Lite2, 2 cores", "#d55e00", "s"),
    "cifar10-dead-leaves": ("no public images, 2 cores", "#009e73", "^"),
}
RECIPES = tuple(LOOKS)
PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "WRN-28-10, all layers": (94.8, 95.4, 96.1, 96.6),
    "WRN-28-10, last layer": (93.1, 93.6, 94.0, 94.2),
    "WRN-16-4, from scratch": (56.8, 64.9, 71.9, 79.5),
}
"""De et al. 2022, table 5 (from ImageNet-32) and table 3: on accelerators."""

Row = Mapping[int, tuple[float, float]]


def accuracies(
    recipe: str, data: Path, out: Path, seeds: int, examples: int | None = None
) -> Row:
    """Return mean and standard deviation at each ε, in percent, of runs made here."""
    row = {}
    size = "all" if examples is None else str(examples)
    for epsilon in EPSILONS:
        found = []
        for seed in range(1, seeds + 1):
            run = out / f"{recipe}-{size}-{epsilon}-{seed}"
            words = [recipe, "--data", str(data), "--epsilon", str(epsilon)]
            words += ["--account", "none"]
            words += ["--features", str(out / f"features-{recipe}-{size}")]
            if examples is not None:
                words += ["--train-examples", str(examples)]
            found.append(100 * trained(words, run)["test_accuracy"])
        spread = statistics.stdev(found) if seeds > 1 else 0.0
        row[epsilon] = (statistics.mean(found), spread)
    return row


def markdown(rows: Mapping[tuple[str, str], Row]) -> str:
    """Return the table: a row for each recipe and size, a column for each ε."""
    lines = heading(("recipe", "images"), EPSILONS)
    for (recipe, size), row in rows.items():
        cells = " | ".join(f"{mean:.1f} ± {std:.1f} %" for mean, std in row.values())
        lines.append(f"| `{recipe}` | {size} | {cells} |")
    return "\n".join(lines)


def draw(rows: Mapping[str, Row], path: Path) -> None:
    """Draw accuracy against ε, ours over the published, each line named at its end."""
    axis = epsilon_axis.new(EPSILONS, 36, (6.4, 4.2), "CIFAR-10's test images")
    for name, heights in PUBLISHED.items():
        look = {"linestyle": "--", "linewidth": 1}
        epsilon_axis.line(axis, EPSILONS, heights, name, "#767676", **look)
    for recipe, row in rows.items():
        name, colour, marker = LOOKS[recipe]
        means = [mean for mean, _ in row.values()]
        epsilon_axis.line(axis, EPSILONS, means, name, colour, marker=marker)
    axis.set_xlabel("ε (δ = 1e-5)")
    epsilon_axis.save(axis, path)


def main() -> None:
    """Train everything, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/public-features"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    made = options.data, options.out, options.seeds
    whole = {recipe: accuracies(recipe, *made) for recipe in RECIPES}
    rows = {(recipe, "50,000"): row for recipe, row in whole.items()}
    if options.sizes:
        for examples in (1000, 5000):
            for recipe in RECIPES:
                row = accuracies(recipe, *made, examples)
                rows[recipe, f"{examples:,}"] = row
    print("\n" + markdown(rows))
    if options.plot is not None:
        draw(whole, options.plot)


if __name__ == "__main__":
    main()
