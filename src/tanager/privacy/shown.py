"""ε as people read it: rounding never makes a guarantee or a proof look better."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def format_epsilon(epsilon: float | None) -> str:
    """Four significant digits, rounded up: of what is claimed or spent."""
    return _rounded(epsilon, ROUND_CEILING)


def format_bound(bound: float | None) -> str:
    """Four significant digits, rounded down: of what an attack proves."""
    return _rounded(bound, ROUND_FLOOR)


def _rounded(epsilon: float | None, rounding: str) -> str:
    if epsilon is None or math.isinf(epsilon):
        return "∞"
    digits = Context(prec=4, rounding=rounding)
    return f"{digits.create_decimal(Decimal(str(epsilon))).normalize():f}"
