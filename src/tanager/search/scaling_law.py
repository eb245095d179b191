"""The scaling law of TAN: accuracy against batch size, at constant η_step and steps.

At a constant signal-to-noise ratio of a step and a constant number of steps, accuracy
is nearly linear in the logarithm of the batch size. So a few cheap runs at small batch
sizes predict what the expensive run reaches, with an interval.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, section 3.4, figures 1 and
    4.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from scipy import stats

from tanager import _validate as validate


FEWEST_BATCH_SIZES = 3
"""With fewer batch sizes the law may be curved and nothing shows it."""
SIGNIFICANT = 0.05
"""False-alarm rate of the tests for curvature and for a rise."""
SAMPLED = 0.05
"""Share of sampling in the variance of an update above which a rise may end."""
FAR = 128.0
"""The largest factor in batch size that the paper simulates (16384 over 128)."""


class Run(NamedTuple):
    """One run of the law.

    Attributes:
        batch_size: expected logical batch size B.
        accuracy: what it reached, in [0, 1].
    """

    batch_size: float
    accuracy: float


class Prediction(NamedTuple):
    """The predicted accuracy of one more run.

    Attributes:
        batch_size: of that run.
        accuracy: the point on the line, in [0, 1].
        low: lower end of the interval, in [0, 1].
        high: upper end.
        confidence: how often such an interval contains the accuracy of one run, if the
            law is a line and runs are normally distributed about it.
    """

    batch_size: float
    accuracy: float
    low: float
    high: float
    confidence: float


@dataclasses.dataclass(frozen=True)
class ScalingLaw:
    """A line through accuracies against log2 B, by least squares.

    Attributes:
        runs: what it was fitted to.
        slope: change of accuracy for each doubling of the batch.
        mean_log2: mean of log2 B; the line passes through `mean` there.
        mean: of the accuracies.
        deviation: standard deviation of a run about the line, with n − 2 degrees of
            freedom; None for two runs.
        spread: sum of squared distances of log2 B from its mean.
        rises: p-value of a slope of at most 0 (one-sided, Student's t); None for two
            runs, or if all runs are exactly on the line.
    """

    runs: tuple[Run, ...]
    slope: float
    mean_log2: float
    mean: float
    deviation: float | None
    spread: float
    rises: float | None

    @classmethod
    def fit(cls, runs: Sequence[Run | tuple[float, float]]) -> Self:
        """Fit the law.

        Args:
            runs: at two batch sizes or more. Repeats at one batch size show how much
                runs vary.

        Raises:
            ValueError: fewer than two different batch sizes, or a number is out of
                range.
        """
        points = tuple(Run(*run) for run in runs)
        for run in points:
            validate.positive(batch_size=run.batch_size)
            validate.share(accuracy=run.accuracy)
        if len({run.batch_size for run in points}) < 2:
            rule = "must be at two batch sizes or more"
            remedy = "a line needs two points; give --simulation-batch-sizes 16 32 64"
            validate.refuse("runs", [run.batch_size for run in points], rule, remedy)
        x = np.log2([run.batch_size for run in points])
        y = [run.accuracy for run in points]
        spread = float(np.sum((x - x.mean()) ** 2))
        line: Any = stats.linregress(x, y, alternative="greater")
        deviation = rises = None
        if len(points) > 2:
            left = y - line.intercept - line.slope * x
            deviation = math.sqrt(float(np.sum(left**2)) / (len(points) - 2))
            rises = float(line.pvalue) if deviation else None
        mean = float(np.mean(y))
        return cls(
            points, float(line.slope), float(x.mean()), mean, deviation, spread, rises
        )

    def at(self, batch_size: float) -> float:
        """Return the accuracy on the line; it can be below 0 or above 1."""
        return self.mean + self.slope * (math.log2(batch_size) - self.mean_log2)

    def predict(self, batch_size: float, confidence: float = 0.95) -> Prediction:
        """Predict the accuracy of one run at a batch size.

        The interval is that of one more run, by Student's t: it includes the
        uncertainty of the line and the variation of a run. For two runs it is [0, 1].

        Raises:
            ValueError: a number is out of range.
        """
        validate.positive(batch_size=batch_size)
        validate.probability(confidence=confidence)
        low, high = self._interval(batch_size, confidence, 1.0)
        accuracy = _share(self.at(batch_size))
        return Prediction(batch_size, accuracy, low, high, confidence)

    def band(self, batch_size: float, confidence: float = 0.95) -> tuple[float, float]:
        """Return the confidence band of the line itself, without a run's variation."""
        return self._interval(batch_size, confidence, 0.0)

    def _interval(
        self, batch_size: float, confidence: float, own: float
    ) -> tuple[float, float]:
        if self.deviation is None:
            return 0.0, 1.0
        middle, count = self.at(batch_size), len(self.runs)
        away = (math.log2(batch_size) - self.mean_log2) ** 2 / self.spread
        half = self.deviation * math.sqrt(own + 1 / count + away)
        half *= float(stats.t.ppf((1 + confidence) / 2, count - 2))
        return _share(middle - half), _share(middle + half)

    def curvature(self) -> float | None:
        """Return the p-value of a line against a parabola (an F test).

        None with fewer than three batch sizes or fewer than four runs.
        """
        freedom = len(self.runs) - 3
        if len({run.batch_size for run in self.runs}) < 3 or freedom < 1:
            return None
        assert self.deviation is not None
        x = [math.log2(run.batch_size) - self.mean_log2 for run in self.runs]
        y = [run.accuracy for run in self.runs]
        left = y - np.polyval(np.polyfit(x, y, 2), x)
        straight, curved = self.deviation**2 * (freedom + 1), float(np.sum(left**2))
        if curved <= 1e-24 * len(x):  # exactly a parabola; real runs are not
            return 1.0 if straight <= 1e-24 * len(x) else 0.0
        return float(stats.f.sf((straight - curved) / (curved / freedom), 1, freedom))

    def without_sampling(
        self,
        batch_size: float,
        noise_multiplier: float,
        parameters: int,
        mean_square: float = 1.0,
    ) -> float:
        """Predict the accuracy if it depends on the noise of sampling alone.

        By a line against log(1 + `sampling_share`), which levels off as B grows, and
        not against log2 B, which does not. Arguments as of `doubts`.
        """
        scale = noise_multiplier / batch_size

        def noise(size: float) -> float:
            share = sampling_share(scale * size, size, parameters, mean_square)
            return math.log1p(share)

        x = [noise(run.batch_size) for run in self.runs]
        line: Any = stats.linregress(x, [run.accuracy for run in self.runs])
        return _share(float(line.intercept + line.slope * noise(batch_size)))

    def doubts(
        self,
        batch_size: float,
        noise_multiplier: float,
        parameters: int,
        mean_square: float = 1.0,
    ) -> tuple[str, ...]:
        """Return the reasons not to trust a prediction; an empty tuple is good.

        Arguments are those of the predicted run, see `sampling_share`.
        """
        doubts = []
        sizes = sorted({run.batch_size for run in self.runs})
        if len(sizes) < FEWEST_BATCH_SIZES:
            doubts.append(
                f"only {len(sizes)} batch sizes: the law may be curved; simulate at "
                f"{FEWEST_BATCH_SIZES} or more"
            )
        if self.deviation is None or len(self.runs) == len(sizes):
            doubts.append(
                "no batch size was repeated: the variation of runs is estimated from "
                "their distance to the line alone; give --repeats 2 or more"
            )
        curved = self.curvature()
        if curved is not None and curved < SIGNIFICANT:
            doubts.append(
                f"the runs are on a curve (p = {curved:.2g}), and a line is extended; "
                "simulate at larger batches"
            )
        if not 0 <= self.at(batch_size) <= 1:
            doubts.append(
                f"the line is at {100 * self.at(batch_size):.1f} % there, which no "
                "accuracy can be: it must level off; simulate at larger batches"
            )
        if batch_size > FAR * sizes[-1]:
            doubts.append(
                f"{batch_size:g} is {batch_size / sizes[-1]:.0f} times the largest "
                f"simulated batch; the TAN paper shows at most {FAR:g} times"
            )
        smallest = sizes[0]
        simulated = noise_multiplier * smallest / batch_size
        share = sampling_share(simulated, smallest, parameters, mean_square)
        moves, adds = "may move", "adds up to"
        if mean_square < 1:
            moves, adds = "moves", "adds"
        if share > 1:
            doubts.append(
                f"at batch size {smallest:g} the noise multiplier is {simulated:.3g}, "
                f"and the random drawing of examples {moves} an update "
                f"{math.sqrt(share):.2g} times as much as the noise: clipping and "
                "sampling decide there; leave out the smallest batches"
            )
        rises = self.rises
        if rises is not None and rises < SIGNIFICANT and share >= SAMPLED:
            end = self.without_sampling(
                batch_size, noise_multiplier, parameters, mean_square
            )
            doubts.append(
                f"accuracy rises with the batch (p = {rises:.2g}), and at batch size "
                f"{smallest:g} the random drawing of examples {adds} "
                f"{100 * share:.0f} % of the noise's variance; if the rise comes from "
                f"that alone it levels off, at {100 * end:.1f} % here; simulate at "
                "larger batches"
            )
        return tuple(doubts)

    def to_json(self) -> dict[str, Any]:
        """Return the law as plain values."""
        return {
            "runs": [run._asdict() for run in self.runs],
            "slope_per_doubling": self.slope,
            "accuracy_at_batch_size_1": self.at(1.0),
            "deviation": self.deviation,
            "curvature_p": self.curvature(),
        }


def sampling_share(
    noise_multiplier: float,
    batch_size: float,
    parameters: int,
    mean_square: float = 1.0,
) -> float:
    """Return the variance of sampling over that of the noise.

    The random batch adds B·C²·m to the variance of a sum of clipped gradients, for m
    the mean square of their norms over C², the noise σ²·C²·d. At constant σ/B the share
    grows like 1/B: TAN's simulation keeps the noise of an update, but not the variation
    of the sample.

    Args:
        noise_multiplier: σ.
        batch_size: B, of N examples. A Poisson sample varies less by 1 − B/N, which is
            left out here.
        parameters: d, the number of trained parameters.
        mean_square: m, from a run without a guarantee: `training.norms.Norms`. 1 is
            the largest it can be.
    """
    if noise_multiplier == 0:
        return math.inf
    return mean_square * batch_size / (noise_multiplier**2 * parameters)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
