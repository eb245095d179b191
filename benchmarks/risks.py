"""Print what an attack on one image can reach, for six recipes at their budgets.

    python benchmarks/risks.py [--peers]

With --peers, the same numbers by gdpnum (μ and regret) and riskcal (advantage and
true-positive rates) stand below ours. Both must be installed; tanager does not need
them.
"""

import argparse
from collections.abc import Iterator, Sequence

from tanager import recipes
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.risk import risk
from tanager.privacy.shown import format_epsilon, format_share
from tanager.recipes.budget import solve_budget


EXAMPLES = {
    "digits": 1437,
    "mnist-lenet": 60_000,
    "cifar10-wrn-16-4-tan": 50_000,
    "cifar100-vit-base-16": 50_000,
    "imagenet-nf-resnet-50": 1_271_167,
    "places365-nf-resnet-50": 1_803_460,
}
"""Recipes, and the number N of training images that their ε is for."""


def peers(one: Mechanism) -> list[str]:
    """Return cells of the table by gdpnum and riskcal, on their grid of 1e-4."""
    import gdpnum
    from dp_accounting.pld import privacy_loss_distribution
    from riskcal import analysis

    step = privacy_loss_distribution.from_gaussian_mechanism(
        one.noise_multiplier,
        sampling_prob=one.sample_rate,
        value_discretization_interval=1e-4,
    )
    run = step.self_compose(one.steps)
    rates = [1 - analysis.get_beta_from_pld(run, alpha=rate) for rate in (0.001, 0.01)]
    shares = [*rates, analysis.get_advantage_from_pld(run)]
    mu, regret = gdpnum.PLDConverter(run).get_mu_and_regret()
    return [f"{100 * each:.4g} %" for each in shares] + [f"{mu:.5g}", f"{regret:.2g}"]


def rows(with_peers: bool) -> Iterator[Sequence[str]]:
    """Yield the rows of the table."""
    for name, examples in EXAMPLES.items():
        budget = solve_budget(recipes.get(name).recipe, examples)
        found = risk(budget.mechanism)
        shares = found.tpr_at_0_1_percent, found.tpr_at_1_percent, found.advantage
        claim = f"{format_epsilon(budget.epsilon)}, {budget.delta:g}"
        numbers = [format_epsilon(found.mu), f"{found.regret:.2g}"]
        yield f"`{name}`", claim, *map(format_share, shares), *numbers
        if with_peers:
            try:
                cells = peers(budget.mechanism)
            except (AssertionError, ValueError) as error:
                cells = [f"failed: {type(error).__name__}", *[""] * 4]
            yield "gdpnum, riskcal", "", *cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", action="store_true")
    with_peers = parser.parse_args(arguments).peers
    rates = ("TPR at 0.1 % FPR", "TPR at 1 % FPR", "advantage")
    print("|", " | ".join(("recipe", "ε, δ", *rates, "μ", "regret")), "|")
    print("|---" * 7 + "|")
    for row in rows(with_peers):
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
