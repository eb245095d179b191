"""The mechanism: the one description of a private run that everything else shares.

The sampler draws with its sample rate, the noise code scales with its noise
multiplier, the accountant composes its steps. There is no second place to type them.
"""

import dataclasses
import enum

from tanager import _validate as validate


LARGE_EPSILON = 20.0
"""An ε from which on a guarantee is called next to nothing, wherever it is shown."""


class Adjacency(enum.StrEnum):
    """Which data sets count as neighbours: what the guarantee protects.

    ADD_OR_REMOVE_ONE: one has exactly one example more than the other.
    REPLACE_ONE: the same size, one example exchanged (ε is about twice as large).
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """DP-SGD as the accountant sees it: the Poisson-subsampled Gaussian, composed.

    In each of `steps` steps every example joins the batch independently with
    probability `sample_rate` (q); each contributes a vector of norm at most the
    clipping norm C to a sum; N(0, (σC)²) noise is added to every coordinate, where σ
    is the `noise_multiplier`. The noise multiplier is relative to C, the most that one
    example contributes, under either adjacency.

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
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE

    def __post_init__(self):
        validate.fraction(
            sample_rate=self.sample_rate,
            remedy="it is the expected batch size divided by the number of examples",
        )
        validate.not_negative(noise_multiplier=self.noise_multiplier)
        validate.whole(steps=self.steps, at_least=1)
        validate.one_of([*Adjacency], adjacency=self.adjacency)
        object.__setattr__(self, "adjacency", Adjacency(self.adjacency))
