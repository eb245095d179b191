"""A plan: what a run will spend, before it is run, and what to worry about.

Of batch size, steps, noise multiplier and ε three are given and the fourth is solved
for.
"""

import dataclasses
import math
from typing import Any, Self

from tanager import _validate as validate
from tanager._files import as_json
from tanager.privacy import accountant as accountants
from tanager.privacy import tan
from tanager.privacy.accountant import Accountant
from tanager.privacy.calibrate import calibrate
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.risk import Risk, risk
from tanager.privacy.shown import format_epsilon


_OVERCHARGED = 1.05
"""How far ε must lie above ε_TAN before the privacy wall is to blame."""
_FAINT = 10.0
"""Below this signal of a class a run may learn little: at 10, 300 photos of ten classes
gave 43 % (docs/results.md); two digits that are easy to tell apart gave 43 to 57 % at
2, but 72 to 92 % at 5 (three runs each)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mechanism on a data set of a known size, and what it spends: see `Plan.solve`.

    Attributes:
        examples: N, the number of training examples (public).
        batch_size: B, the expected number of examples in a batch.
        steps: T, the number of noisy updates.
        noise_multiplier: σ.
        delta: δ.
        adjacency: which data sets are neighbours.
        solved: which of batch_size, steps, noise_multiplier and epsilon was left out.
        accountant: whose ε is claimed, and kept the budget.
        epsilon: ε by each accountant; None where it does not apply.
        warnings: what to worry about, as sentences.
    """

    examples: int
    batch_size: int
    steps: int
    noise_multiplier: float
    delta: float
    adjacency: Adjacency
    solved: str
    accountant: str
    epsilon: dict[str, float | None]
    warnings: tuple[str, ...]

    @classmethod
    def solve(
        cls,
        examples: int,
        batch_size: int | None = None,
        steps: int | None = None,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        adjacency: Adjacency | str = Adjacency.ZERO_OUT,
        accountant: str = Accountant.PLD,
    ) -> Self:
        """Plan a run, solving for the one of four parameters that is left out.

        The batch size is the largest whole number that
        keeps it, the number of steps likewise; the noise multiplier is the smallest,
        to a relative 1e-3.

        Args:
            examples: N, at least 1.
            batch_size: B, from 1 to N.
            steps: T.
            noise_multiplier: σ.
            epsilon: the budget ε, above 0.
            delta: δ; by default `default_delta`.
            adjacency: which data sets are neighbours.
            accountant: whose ε keeps the budget and is claimed, "pld" or "rdp".

        Raises:
            ValueError: not exactly one of the four is left out, one is out of range,
                or no value of the missing one keeps the budget.
        """
        validate.whole(examples=examples, at_least=1)
        if batch_size is not None:
            validate.whole(batch_size=batch_size, at_least=1)
            if batch_size > examples:
                rule = f"must not exceed the number of examples ({examples})"
                remedy = "its sample rate would be above 1"
                validate.refuse("batch_size", batch_size, rule, remedy)
        if delta is None:
            delta = default_delta(examples)
        validate.probability(delta=delta)
        validate.one_of([*Adjacency], adjacency=adjacency)
        adjacency = Adjacency(adjacency)
        accountants.check_claim(accountant, adjacency)
        solved = _missing(
            batch_size=batch_size,
            steps=steps,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
        )
        rate = None if batch_size is None else batch_size / examples
        if epsilon is None:
            assert rate and steps is not None and noise_multiplier is not None
            mechanism = Mechanism(rate, noise_multiplier, steps, adjacency)
        else:
            mechanism = calibrate(
                epsilon=epsilon,
                delta=delta,
                sample_rate=rate,
                noise_multiplier=noise_multiplier,
                steps=steps,
                accountant=accountant,
                adjacency=adjacency,
            )
            if batch_size is None:
                batch_size = _whole_batch(
                    mechanism, examples, epsilon, delta, accountant
                )
                rate = batch_size / examples
                mechanism = dataclasses.replace(mechanism, sample_rate=rate)
        assert batch_size is not None
        replace_one = adjacency is Adjacency.REPLACE_ONE
        plan = cls(
            examples=int(examples),
            batch_size=int(batch_size),
            steps=int(mechanism.steps),
            noise_multiplier=float(mechanism.noise_multiplier),
            delta=float(delta),
            adjacency=adjacency,
            solved=solved,
            accountant=str(accountant),
            epsilon={
                str(name): None
                if name is Accountant.RDP and replace_one
                else accountants.epsilon(mechanism, delta, name)
                for name in Accountant
            },
            warnings=(),
        )
        return dataclasses.replace(plan, warnings=tuple(_warnings(plan)))

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that every number of the plan is about."""
        return Mechanism(
            self.batch_size / self.examples,
            self.noise_multiplier,
            self.steps,
            self.adjacency,
        )

    @property
    def risk(self) -> Risk:
        """What any attack on one example can reach, at the most."""
        return risk(self.mechanism)

    @property
    def epochs(self) -> float:
        """How often each example is used, on average."""
        return self.steps * self.batch_size / self.examples

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object of JSON: what is not finite becomes None."""
        mechanism = self.mechanism
        record = {
            "examples": self.examples,
            "batch_size": self.batch_size,
            "sample_rate": mechanism.sample_rate,
            "steps": self.steps,
            "epochs": self.epochs,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "adjacency": str(self.adjacency),
            "accountant": self.accountant,
            "epsilon": self.epsilon,
            "eta": tan.eta(mechanism),
            "eta_step": tan.eta_step(mechanism),
            "total_noise": tan.total_noise(mechanism),
            "risk": self.risk.to_json(),
            "solved": self.solved,
            "warnings": list(self.warnings),
        }
        return as_json(record)


def default_delta(examples: int) -> float:
    """Return the largest number of one digit, such as 2e-6, up to 0.1 / `examples`.

    For fewer than 10¹⁰ examples this is below N^-1.1 as well.
    """
    tenfold = 10 * int(examples)
    places = len(str(tenfold - 1))
    return float(f"{10**places // tenfold}e-{places}")


def delta_warning(delta: float, examples: int) -> str | None:
    """Return what is wrong with a δ above 0.1/N, as a sentence; else None."""
    if delta * examples <= 0.1 * (1 + 1e-9):
        return None
    text = f"delta ({delta:g}) is above 0.1/N ({0.1 / examples:.3g})"
    if delta * examples >= 1:
        text = (
            f"delta ({delta:g}) is not below 1/N ({1 / examples:.3g}): a"
            " mechanism that publishes one example outright would pass"
        )
    return f"{text}; use {default_delta(examples):g}"


def few_warning(
    mechanism: Mechanism, examples: int, classes: int | None, unit: str = "example"
) -> str | None:
    """Return that so few examples may teach little, as a sentence; else None.

    Compared are the most that the examples of an average class can add in a run, if all
    their gradients agree, and the noise in that direction. Where each has any number of
    labels, and `classes` is None, half of all are compared.
    """
    signal = math.sqrt(2) * tan.eta(mechanism) * examples / (classes or 2)
    if signal >= _FAINT:
        return None
    of, those = f" of {classes} classes", "those of one class"
    if classes is None:
        of, those = "", "half of them"
    return (
        f"{examples} {unit}s{of} are few for this much noise: {those} add at most "
        f"{signal:.2g} times the noise, and below {_FAINT:g} times a model may learn "
        f"little; use more {unit}s, or a larger ε"
    )


def _missing(**values: float | None) -> str:
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == 1:
        return missing[0]
    names = "batch_size, steps, noise_multiplier and epsilon"
    if missing:
        listed = ", ".join(missing)
        raise ValueError(
            f"give three of {names}, the fourth is solved for: {listed} are missing"
        )
    raise ValueError(f"leave out one of {names}, to be solved for: all four are given")


def _whole_batch(
    mechanism: Mechanism,
    examples: int,
    epsilon: float,
    delta: float,
    accountant: str,
) -> int:
    """Round the sample rate down to a whole batch, the largest within the budget."""
    batch_size = math.floor(mechanism.sample_rate * examples)
    larger = batch_size + 1
    if larger <= examples:
        rounded_up = dataclasses.replace(mechanism, sample_rate=larger / examples)
        if accountants.epsilon(rounded_up, delta, accountant) <= epsilon:
            return larger
    if batch_size < 1:
        rule = "is exceeded even with one example a batch"
        remedy = "raise epsilon or the noise multiplier, or take fewer steps"
        validate.refuse("epsilon", epsilon, rule, remedy)
    return batch_size


def _warnings(plan: Plan) -> list[str]:
    warnings, sigma, spent = [], plan.noise_multiplier, plan.epsilon
    if text := delta_warning(plan.delta, plan.examples):
        warnings.append(text)
    if sigma == 0:
        return [*warnings, "without noise there is no privacy: ε is infinite"]
    infinite = [name for name, value in spent.items() if value == math.inf]
    if infinite:
        warnings.append(f"ε by {', '.join(infinite)} is too large to compute")
    eta = tan.eta(plan.mechanism)
    if eta >= 2:
        warnings.append(
            f"the signal of one example, η = {eta:.3g} times the noise, stands out: at"
            " η ≥ 2 the guarantee says little"
        )
    pld, approximation = spent[Accountant.PLD], spent[Accountant.TAN]
    assert pld is not None and approximation is not None
    if sigma < tan.PRIVACY_WALL and pld > _OVERCHARGED * approximation:
        warnings.append(
            f"privacy wall: with a noise multiplier of {sigma:.4g}, below"
            f" {tan.PRIVACY_WALL:g}, ε is {format_epsilon(pld)} where ε_TAN is"
            f" {approximation:.3g}; at the same steps and η, {'; '.join(_moves(plan))}"
        )
    return warnings


def _moves(plan: Plan) -> list[str]:
    """Name the moves out of the privacy wall (TAN, 3.4), with their price."""
    sigma, moves = plan.noise_multiplier, []
    doublings = max(1, math.ceil(math.log2(tan.PRIVACY_WALL / sigma)))
    for factor in dict.fromkeys((2, 2**doublings)):
        larger, noise = factor * plan.batch_size, format_epsilon(factor * sigma)
        if larger > plan.examples:
            moves.append(
                f"batch size {larger} with noise multiplier {noise} would"
                f" follow, but exceeds the {plan.examples} examples: use more examples,"
                " or raise the noise multiplier alone"
            )
            break
        moved = tan.at_batch_size(plan.mechanism, factor=factor)
        after = accountants.epsilon(moved, plan.delta)
        cost = "twice" if factor == 2 else f"{factor} times"
        moves.append(
            f"batch size {larger} and noise multiplier {noise} give"
            f" ε = {format_epsilon(after)} for {cost} the epochs"
        )
    return moves
