"""The mechanism: the one description of a private run that everything else shares."""

import dataclasses
import enum
from collections.abc import Sequence

from tanager import _validate as validate


LARGE_EPSILON = 20.0
"""An ε from which every message says that the guarantee protects almost nothing."""


class Adjacency(enum.StrEnum):
    """Which data sets count as neighbours: what the guarantee protects.

    ZERO_OUT: one example is replaced by an empty one: it keeps its place, is sampled
        like the others, and contributes zero. The number of places N is public. The
        content of an example is hidden; the number of places is not.
    ADD_OR_REMOVE_ONE: one data set has exactly one example more, the last one, so N is
        private and updates are divided by a declared size. ε is the same as under
        zero-out, which holds too.
    REPLACE_ONE: one example is exchanged for another; N is public. ε is larger, often
        about twice.

    References:
        Kairouz et al. 2021, arXiv:2103.00039, section 2 (zero-out).
    """

    ZERO_OUT = "zero-out"
    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"

    @property
    def signals(self) -> int:
        """How far neighbours' sums are apart, in units of the clipping norm: 1 or 2."""
        return 2 if self is Adjacency.REPLACE_ONE else 1

    @property
    def size_is_public(self) -> bool:
        """Whether neighbours have one size, so that it may be published."""
        return self is not Adjacency.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """DP-SGD as the accountant sees it: the Poisson-subsampled Gaussian, composed.

    In each of `steps` steps every example joins the batch independently with
    probability `sample_rate` (q); each contributes a vector of norm at most the
    clipping norm C to a sum; N(0, (σC)²) noise is added to every coordinate, where σ
    is the `noise_multiplier`, relative to C under every adjacency.

    Attributes:
        sample_rate: q = expected batch size / number of examples, in (0, 1].
        noise_multiplier: σ ≥ 0; 0 gives no privacy (ε = ∞).
        steps: number of noisy updates, at least 1.
        adjacency: which data sets are neighbours.

    Raises:
        ValueError: a field is out of range.

    References:
        Unlocking High-Accuracy DP Image Classification, equations (2) and (3).
        Abadi et al. 2016, arXiv:1607.00133.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __post_init__(self):
        validate.fraction(
            sample_rate=self.sample_rate,
            remedy="it is the expected batch size divided by the number of examples",
        )
        validate.not_negative(noise_multiplier=self.noise_multiplier)
        validate.whole(steps=self.steps, at_least=1)
        validate.one_of([*Adjacency], adjacency=self.adjacency)
        plain = {
            "sample_rate": float(self.sample_rate),
            "noise_multiplier": float(self.noise_multiplier),
            "steps": int(self.steps),
            "adjacency": Adjacency(self.adjacency),
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)  # JSON holds no number of NumPy's

    def require_public_size(self) -> None:
        """Refuse to use the number of examples as a public constant if it is private.

        Raises:
            ValueError: the adjacency is add-or-remove-one.
        """
        if not self.adjacency.size_is_public:
            validate.refuse(
                "adjacency",
                str(self.adjacency),
                "protects the number of examples, so updates must not be divided by it",
                "declare a size that was chosen without looking at the data, or use "
                "zero-out, where the number is public",
            )


def require_step(mechanism: Mechanism, step: int, remedy: str = "") -> None:
    """Refuse a step that is none of the mechanism's, which are numbered from 0."""
    validate.whole(step=step, at_least=0)
    if step >= mechanism.steps:
        rule = f"must be below the mechanism's {mechanism.steps} steps"
        validate.refuse("step", step, rule, remedy)


def common_adjacency(mechanisms: Sequence[Mechanism]) -> Adjacency:
    """Return the adjacency of all mechanisms; of none it is zero-out.

    Raises:
        ValueError: they differ, and so have no common guarantee.
    """
    adjacencies = sorted({one.adjacency for one in mechanisms})
    if len(adjacencies) > 1:
        validate.refuse("adjacency", adjacencies, "must be the same for all mechanisms")
    return adjacencies[0] if adjacencies else Adjacency.ZERO_OUT
