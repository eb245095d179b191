"""TAN: the Total Amount of Noise, and moves that keep it constant.

When the noise multiplier σ is at least about 2, the privacy budget depends on the
sample rate q, σ and the number of steps T (S in the paper) only through one number: the
individual signal-to-noise ratio η, with η² = q²T / (2σ²), or its inverse Σ = 1/η, the
total amount of noise. So (q, σ, T) can be traded at a constant η: a cheap run at a
small batch size shows how the expensive one will train. No approximation here is a
guarantee.

References:
    Sander, Stock and Sablayrolles 2023, TAN Without a Burn, sections 3.1 to 3.4.
"""

import dataclasses
import math

from tanager import _validate as validate
from tanager.privacy.mechanism import Mechanism


PRIVACY_WALL = 2.0
"""Noise multiplier below which ε grows faster than TAN says (section 3.2)."""


def eta_step(mechanism: Mechanism) -> float:
    """Return η_step = q / (√2 σ), the signal-to-noise ratio of one step (3.1)."""
    if mechanism.noise_multiplier == 0:
        return math.inf
    return mechanism.sample_rate / (math.sqrt(2) * mechanism.noise_multiplier)


def eta(mechanism: Mechanism) -> float:
    """Return η = √T η_step, the signal-to-noise ratio of the run (definition 3.1)."""
    return math.sqrt(mechanism.steps) * eta_step(mechanism)


def total_noise(mechanism: Mechanism) -> float:
    """Return the total amount of noise, Σ = 1/η (definition 3.1)."""
    return math.sqrt(2 / mechanism.steps) * (
        mechanism.noise_multiplier / mechanism.sample_rate
    )


def epsilon_tan(eta: float, delta: float) -> float:
    """Return ε_TAN = η² + 2η √log(1/δ) (equation 4); for replace-one, pass 2η.

    Raises:
        ValueError: η is negative, or δ is not strictly between 0 and 1.
    """
    if eta == math.inf:
        return math.inf
    validate.not_negative(eta=eta)
    validate.probability(delta=delta)
    return eta * eta + 2 * eta * math.sqrt(-math.log(delta))


def at_batch_size(mechanism: Mechanism, *, factor: float) -> Mechanism:
    """Multiply sample rate and noise multiplier by a factor, so η_step stays (3.4).

    The run trains much alike; its cost changes by the same factor. A smaller batch
    simulates a large run cheaply, without its guarantee; a larger one leaves the
    privacy wall.

    Raises:
        ValueError: the factor is not positive, or the new q exceeds 1.
    """
    validate.positive(factor=factor)
    sample_rate = factor * mechanism.sample_rate
    validate.fraction(
        sample_rate=sample_rate,
        remedy="the batch would be larger than the data: use more examples, or a "
        "smaller factor",
    )
    return dataclasses.replace(
        mechanism,
        sample_rate=sample_rate,
        noise_multiplier=factor * mechanism.noise_multiplier,
    )


def at_steps(mechanism: Mechanism, steps: int) -> Mechanism:
    """Change the number of steps at the same η and σ: q = ησ√(2/T) (4.3).

    Raises:
        ValueError: `steps` is below 1, or so small that q would exceed 1.
    """
    validate.whole(steps=steps, at_least=1)
    sample_rate = mechanism.sample_rate * math.sqrt(mechanism.steps / steps)
    if sample_rate > 1:
        fewest = math.ceil(mechanism.steps * mechanism.sample_rate**2)
        rule = f"would need a sample rate of {sample_rate:.3g}, above 1"
        validate.refuse("steps", steps, rule, f"take at least {fewest} steps")
    return dataclasses.replace(mechanism, sample_rate=sample_rate, steps=steps)
