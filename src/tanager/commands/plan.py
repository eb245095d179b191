"""`tanager plan`: plan the privacy budget of a run."""

import dataclasses
import pathlib
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from tanager._terminal import new_console
from tanager.commands import flags
from tanager.commands.tables import digits, new_table, print_json, print_table
from tanager.privacy import frontier as frontiers
from tanager.privacy import tan
from tanager.privacy.accountant import Accountant
from tanager.privacy.mechanism import LARGE_EPSILON, Adjacency
from tanager.privacy.plan import Plan
from tanager.privacy.shown import format_delta, format_epsilon
from tanager.report import guarantee


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Plan the privacy budget of a run.

    Give three of batch size, steps, noise multiplier and epsilon. The fourth is
    computed.
    """

    examples: int
    """Number of training examples N."""

    batch_size: int | None = None
    """Expected batch size B, in examples."""

    steps: int | None = None
    """Number of updates T."""

    noise_multiplier: float | None = None
    """σ: standard deviation of the noise divided by the clipping norm."""

    epsilon: float | None = None
    """Privacy budget ε."""

    delta: float | None = None
    """δ of the guarantee. Default: 0.1/N or less, one digit."""

    adjacency: Annotated[
        str, tyro.conf.arg(metavar="{zero-out,add-or-remove-one,replace-one}")
    ] = str(Adjacency.ZERO_OUT)
    """Which data sets count as neighbours."""

    accountant: Literal["pld", "rdp"] = "pld"
    """How ε is computed: pld, which is tight, or rdp, as papers report it."""

    cheapest: bool = False
    """Compare smaller and larger batches: their ε and their compute."""

    json: flags.Json = False

    plot: pathlib.Path | None = None
    """Draw the plan and privacy wall as PNG or SVG; --cheapest: ε against compute."""


_LABELS = {
    Accountant.PLD: ("PLD", "a guarantee, tight"),
    Accountant.RDP: ("RDP", "a guarantee, looser; what the papers report"),
    Accountant.GDP_CLT: ("GDP-CLT", "approximation, never a guarantee"),
    Accountant.TAN: ("TAN", "approximation, never a guarantee"),
}
_SOLVABLE = ("batch_size", "steps", "noise_multiplier", "epsilon")


def run(arguments: list[str]) -> int:
    options = flags.read(Arguments, "plan", arguments)
    given: dict[str, Any] = dataclasses.asdict(options)
    others = {"json", "plot", "cheapest"}
    known = {name: given[name] for name in _SOLVABLE if given[name] is not None}
    if len(known) != len(_SOLVABLE) - 1:
        *first, last = (f"--{name.replace('_', '-')}" for name in _SOLVABLE)
        typed = ", ".join(f"--{name.replace('_', '-')}" for name in known) or "none"
        raise ValueError(
            f"give three of {', '.join(first)} and {last}, and the fourth is computed; "
            f"given: {typed}"
        )
    plan = Plan.solve(**{name: given[name] for name in given.keys() - others})
    points = frontiers.frontier(plan) if options.cheapest else []
    if options.plot is not None:
        from tanager.report import plan_figures

        if points:
            plan_figures.plot_frontier(plan, points, options.plot)
        else:
            plan_figures.plot(plan, options.plot)
    if options.json:
        found = {"frontier": [point._asdict() for point in points]}
        return print_json(plan.to_json() | (found if options.cheapest else {}))
    _print_table(plan, new_console())
    if points:
        _print_frontier(points, new_console())
    if options.plot is not None:
        print(f"Drawn to {options.plot}")
    return 0


def _print_frontier(points: list[frontiers.Point], console: Console) -> None:
    console.print("\nat the same steps and η:")
    least = min(point.epsilon for point in points)
    best = next(n for n, point in enumerate(points) if point.cheapest)
    rows = [
        (
            str(point.batch_size),
            format_epsilon(point.noise_multiplier),
            format_epsilon(point.epsilon),
            f"{digits(100 * (point.epsilon / least - 1), 2)} %",
            f"{point.compute:.3g}",
            "this plan" if point.compute == 1 else "",
            ("dear in ε", "cheapest", "dear in compute")[(n >= best) + (n > best)],
        )
        for n, point in enumerate(points)
    ]
    headings = ("batch size", "σ", "ε", "above least", "compute", "", "which is")
    print_table(new_table(*headings, texts=("which is",), rows=rows))
    for sentence in frontiers.advice(points):
        console.print(sentence, soft_wrap=True, markup=False)


def _print_table(plan: Plan, console: Console) -> None:
    mechanism = plan.mechanism
    solved = {plan.solved: "  ← solved for"}
    settings = (
        ("", "examples N", f"{plan.examples}"),
        ("batch_size", "batch size B", f"{plan.batch_size}"),
        ("", "sample rate q", f"{mechanism.sample_rate:.6g}"),
        ("steps", "steps T", f"{plan.steps}"),
        ("", "epochs", f"{plan.epochs:.4g}"),
        ("noise_multiplier", "noise multiplier σ", f"{plan.noise_multiplier:.6g}"),
        ("", "δ", format_delta(plan.delta)),
        ("", "adjacency", str(plan.adjacency)),
        ("", "signal to noise η", f"{tan.eta(mechanism):.4g}"),
        ("", "η of one step", f"{tan.eta_step(mechanism):.4g}"),
        ("", "total noise Σ = 1/η", f"{tan.total_noise(mechanism):.4g}"),
    )
    table = new_table(
        *("setting", "value"),
        texts=("value",),
        rows=[(label, text + solved.get(name, "")) for name, label, text in settings],
    )
    table.show_header = False
    print_table(table)
    console.print()
    epsilons = new_table("accountant", "ε", "which is", texts=("ε", "which is"))
    for accountant, (label, meaning) in _LABELS.items():
        spent = plan.epsilon[accountant]
        shown = format_epsilon(spent)
        if accountant == plan.accountant:
            meaning = "the guarantee" + solved.get("epsilon", "")
        if spent is None:
            shown, meaning = "—", f"not defined for {plan.adjacency}"
        epsilons.add_row(label, shown, meaning)
    print_table(epsilons)
    console.print()
    risk = plan.risk.to_json()
    console.print(guarantee.risk_in_words(risk), soft_wrap=True)
    headings = ("attack on one image", "at most", "without the model")
    rows = [
        *guarantee.risk_rows(risk),
        ("μ of Gaussian DP", guarantee.risk_as_gaussian(risk), "0"),
    ]
    print_table(new_table(*headings, texts=headings, rows=rows))
    warned = list(plan.warnings)
    if (plan.epsilon[plan.accountant] or 0.0) >= LARGE_EPSILON:
        warned.insert(0, "an ε this large protects next to nothing")
    for warning in warned:
        console.print()
        console.print(f"Warning: {warning}.", style="yellow", markup=False)
