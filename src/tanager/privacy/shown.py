"""ε, δ and risks as text: rounding makes no guarantee and no proof look better."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def format_epsilon(epsilon: float | None) -> str:
    """Return ε with four significant digits, rounded up: what is claimed or spent.

    So is noise that is advised: with less, more would be spent.
    """
    return _rounded(epsilon, ROUND_CEILING)


def format_bound(bound: float | None) -> str:
    """Return a bound with four significant digits, rounded down: what is proven."""
    return _rounded(bound, ROUND_FLOOR)


def format_share(share: float) -> str:
    """Return a risk in percent with three significant digits, rounded up."""
    digits = Context(prec=3, rounding=ROUND_CEILING)
    exact = 100 * Decimal(str(min(share, 1.0)))
    return f"{digits.plus(exact).normalize():f} %"


def format_delta(delta: float) -> str:
    """Return δ with six significant digits, rounded up.

    A claim at a δ holds at any larger one, and not at a smaller one.
    """
    digits = Context(prec=6, rounding=ROUND_CEILING)
    return f"{float(digits.create_decimal(Decimal(str(delta)))):g}"


def _rounded(epsilon: float | None, rounding: str) -> str:
    if epsilon is None or math.isinf(epsilon):
        return "∞"
    digits = Context(prec=4, rounding=rounding)
    rounded = digits.create_decimal(Decimal(str(epsilon))).normalize()
    return f"{rounded:f}" if epsilon < 1e9 else f"{rounded:g}"
