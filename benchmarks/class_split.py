"""Learn five classes of CIFAR-10 in the open, then the other five in private.

    python benchmarks/class_split.py --data DIR [--out runs/class-split] [--plot FILE]

Trains the recipes `cifar10-first-five-pretraining` and, from its weights at each ε and
in each way of fine-tuning, `cifar10-other-five`; and from scratch, to see what the
pretraining is worth. Prints each command before it is run, and in the end a table as
Markdown. Killed at any moment, the same command goes on.

What each way is given besides was chosen at ε = 4 on `--validation-examples 5000`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import epsilon_axis
from trained import heading, trained


EPSILONS = (1, 2, 4, 8)
WAYS: Mapping[str, Mapping[str, Any]] = {
    "last layer": {
        "fine-tune": "last-layer",
        "batch-size": 4096,
        "steps": 100,
        "learning-rate": 16.0,
    },
    "LoRA": {"fine-tune": "lora"},
    "all layers": {"fine-tune": "all"},
    "from scratch": {},
}
LOOKS = {
    "last layer": ("#0072b2", "o"),
    "LoRA": ("#d55e00", "s"),
    "all layers": ("#009e73", "^"),
    "from scratch": ("#767676", "D"),
}


def train(recipe: str, out: Path, **fields: Any) -> dict[str, Any]:
    """Run one recipe, or go on with it, and return its result."""
    words = [recipe]
    for name, value in fields.items():
        words += [f"--{name}", str(value)]
    result = trained(words, out)
    config = json.loads((out / "config.json").read_text())
    return {**result, "parameters": config["parameters"]}


def markdown(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Return the table: a row for each way, a column for each ε."""
    lines = heading(("trained", "parameters"), EPSILONS)
    for way, row in results.items():
        cells = [f"{100 * row[e]['test_accuracy_ema']:.1f} %" for e in EPSILONS]
        count = row[EPSILONS[0]]["parameters"]
        lines.append(f"| {way} | {count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path) -> None:
    """Draw accuracy against ε, a line for each way, named at its end."""
    axis = epsilon_axis.new(EPSILONS, 16, (6.4, 4.0), "the test images")
    for way, row in results.items():
        colour, marker = LOOKS[way]
        heights = [100 * row[e]["test_accuracy_ema"] for e in EPSILONS]
        epsilon_axis.line(axis, EPSILONS, heights, way, colour, marker=marker)
    axis.set_xlabel("ε (δ = 1e-5, PLD)")
    epsilon_axis.save(axis, path)


def main() -> None:
    """Train everything, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/class-split"))
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    data = {"data": options.data}
    opened = options.out / "first-five"
    public = train("cifar10-first-five-pretraining", opened, **data)
    weights = {"weights": opened / "model-ema.safetensors"}
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for way, fields in WAYS.items():
        start = weights if "fine-tune" in fields else {}
        results[way] = {
            epsilon: train(
                "cifar10-other-five",
                options.out / f"{way.replace(' ', '-')}-{epsilon}",
                **data,
                **start,
                epsilon=epsilon,
                **fields,
            )
            for epsilon in EPSILONS
        }
    accuracy = 100 * public["test_accuracy_ema"]
    print(f"\nfirst five classes, in the open: {accuracy:.1f} %\n\n{markdown(results)}")
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
