"""A plan: what a run will spend, before it is run.

Of batch size, steps, noise multiplier and ε three are given and the fourth is solved
for. The plan then says ε by every accountant, where the run stands on the scale of
TAN, and what to worry about.
"""

import dataclasses
import math
from typing import Any, Self

from tanager import _validate as validate
from tanager.privacy import accountant, tan
from tanager.privacy.accountant import Accountant
from tanager.privacy.calibrate import calibrate
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.privacy.shown import format_epsilon


_OVERCHARGED = 1.05
"""How far ε must lie above ε_TAN before the privacy wall is to blame."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mechanism on a data set of a known size, and what it spends.

    Make one by `Plan.solve`.

    Attributes:
        examples: N, the number of training examples (public).
        batch_size: B, the expected number of examples in a batch.
        steps: S, the number of noisy updates.
        noise_multiplier: σ.
        delta: δ.
        adjacency: which data sets are neighbours.
        solved: which of batch_size, steps, noise_multiplier and epsilon was left out.
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
    ) -> Self:
        """Plan a run, solving for the one of four parameters that is left out.

        The budget is kept by PLD. The batch size is the largest whole number that
        keeps it, the number of steps likewise; the noise multiplier is the smallest,
        to a relative 1e-3.

        Args:
            examples: N, at least 1.
            batch_size: B, from 1 to N, or None.
            steps: S, or None.
            noise_multiplier: σ, or None.
            epsilon: the budget ε > 0, or None.
            delta: δ; by default the largest power of ten strictly below 1/N.
            adjacency: which data sets are neighbours.

        Raises:
            ValueError: not exactly one of the four is left out, one is out of range,
                or no value of the missing one keeps the budget.
        """
        validate.whole(examples=examples, at_least=1)
        if batch_size is not None:
            validate.whole(batch_size=batch_size, at_least=1)
            if batch_size > examples:
                validate.refuse(
                    "batch_size",
                    batch_size,
                    f"must not exceed the number of examples ({examples})",
                    "its sample rate would be above 1",
                )
        if delta is None:
            delta = default_delta(examples)
        validate.probability(delta=delta)
        validate.one_of([*Adjacency], adjacency=adjacency)
        adjacency = Adjacency(adjacency)
        solved = _missing(
            batch_size=batch_size,
            steps=steps,
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
        )
        if epsilon is None:
            assert batch_size and steps is not None and noise_multiplier is not None
            mechanism = Mechanism(
                batch_size / examples, noise_multiplier, steps, adjacency
            )
        else:
            mechanism = calibrate(
                epsilon=epsilon,
                delta=delta,
                sample_rate=None if batch_size is None else batch_size / examples,
                noise_multiplier=noise_multiplier,
                steps=steps,
                adjacency=adjacency,
            )
            if batch_size is None:
                batch_size = _whole_batch(mechanism, examples, epsilon, delta)
                mechanism = dataclasses.replace(
                    mechanism, sample_rate=batch_size / examples
                )
        assert batch_size is not None
        spent = _all_epsilons(mechanism, delta)
        return cls(
            examples=int(examples),
            batch_size=int(batch_size),
            steps=int(mechanism.steps),
            noise_multiplier=float(mechanism.noise_multiplier),
            delta=float(delta),
            adjacency=adjacency,
            solved=solved,
            epsilon=spent,
            warnings=tuple(_warnings(mechanism, examples, batch_size, delta, spent)),
        )

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
    def epochs(self) -> float:
        """How often each example is used, on average."""
        return self.steps * self.batch_size / self.examples

    def to_json(self) -> dict[str, Any]:
        """Return the plan as an object of JSON: what is not finite becomes None."""
        mechanism = self.mechanism
        return {
            "examples": self.examples,
            "batch_size": self.batch_size,
            "sample_rate": mechanism.sample_rate,
            "steps": self.steps,
            "epochs": self.epochs,
            "noise_multiplier": self.noise_multiplier,
            "delta": self.delta,
            "adjacency": str(self.adjacency),
            "epsilon": {name: _finite(spent) for name, spent in self.epsilon.items()},
            "eta": _finite(tan.eta(mechanism)),
            "eta_step": _finite(tan.eta_step(mechanism)),
            "total_noise": tan.total_noise(mechanism),
            "solved": self.solved,
            "warnings": list(self.warnings),
        }


def default_delta(examples: int) -> float:
    """Return the largest power of ten strictly below 1 / `examples`."""
    return float(f"1e-{len(str(int(examples)))}")


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
    mechanism: Mechanism, examples: int, epsilon: float, delta: float
) -> int:
    """Round the sample rate down to a whole batch, the largest within the budget."""
    batch_size = math.floor(mechanism.sample_rate * examples)
    larger = batch_size + 1
    if larger <= examples:
        rounded_up = dataclasses.replace(mechanism, sample_rate=larger / examples)
        if accountant.epsilon(rounded_up, delta) <= epsilon:
            return larger
    if batch_size < 1:
        validate.refuse(
            "epsilon",
            epsilon,
            "is exceeded even with one example a batch",
            "raise epsilon or the noise multiplier, or take fewer steps",
        )
    return batch_size


def _all_epsilons(mechanism: Mechanism, delta: float) -> dict[str, float | None]:
    spent: dict[str, float | None] = {}
    for name in Accountant:
        refused = (
            name is Accountant.RDP and mechanism.adjacency is Adjacency.REPLACE_ONE
        )
        spent[str(name)] = (
            None if refused else accountant.epsilon(mechanism, delta, name)
        )
    return spent


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _warnings(
    mechanism: Mechanism,
    examples: int,
    batch_size: int,
    delta: float,
    spent: dict[str, float | None],
) -> list[str]:
    warnings = []
    if delta >= 1 / examples:
        warnings.append(
            f"delta ({delta:g}) is not below 1/N ({1 / examples:.3g}): a mechanism that"
            " publishes one example outright would pass; use"
            f" {default_delta(examples):g}"
        )
    infinite = [name for name, value in spent.items() if value == math.inf]
    if mechanism.noise_multiplier == 0:
        warnings.append("without noise there is no privacy: ε is infinite")
    elif infinite:
        warnings.append(f"ε by {', '.join(infinite)} is too large to compute")
    if mechanism.noise_multiplier > 0 and tan.eta(mechanism) >= 2:
        warnings.append(
            f"the signal of one example, η = {tan.eta(mechanism):.3g} times the noise,"
            " stands out: at η ≥ 2 the guarantee says little"
        )
    pld, approximation = spent[Accountant.PLD], spent[Accountant.TAN]
    assert pld is not None and approximation is not None
    if (
        0 < mechanism.noise_multiplier < tan.PRIVACY_WALL
        and pld > _OVERCHARGED * approximation
    ):
        warnings.append(_wall(mechanism, examples, batch_size, delta, spent))
    return warnings


def _wall(
    mechanism: Mechanism,
    examples: int,
    batch_size: int,
    delta: float,
    spent: dict[str, float | None],
) -> str:
    """Name the move out of the privacy wall (TAN, 3.4), with its price."""
    sigma = mechanism.noise_multiplier
    text = (
        f"privacy wall: with a noise multiplier of {sigma:.4g}, below"
        f" {tan.PRIVACY_WALL:g}, ε is {format_epsilon(spent[Accountant.PLD])} where"
        f" ε_TAN is {spent[Accountant.TAN]:.3g}"
    )
    doublings = max(1, math.ceil(math.log2(tan.PRIVACY_WALL / sigma)))
    moves = []
    for factor in dict.fromkeys((2, 2**doublings)):
        larger = factor * batch_size
        if larger > examples:
            moves.append(
                f"batch size {larger} with noise multiplier {factor * sigma:.4g} would"
                f" follow, but exceeds the {examples} examples: use more examples, or"
                " raise the noise multiplier alone"
            )
            break
        moved = tan.at_batch_size(mechanism, factor=factor)
        after = accountant.epsilon(moved, delta)
        cost = "twice" if factor == 2 else f"{factor} times"
        moves.append(
            f"batch size {larger} and noise multiplier {factor * sigma:.4g} give"
            f" ε = {format_epsilon(after)} for {cost} the epochs"
        )
    return f"{text}; at the same steps and η, {'; '.join(moves)}"
