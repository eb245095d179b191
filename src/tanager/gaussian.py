"""Gaussian noise in whole numbers, drawn from its exact law.

Floating-point normals betray what they are added to: which sums are possible depends on
the data (Mironov 2012). Here a draw is round(s·N) for a real normal N, without any
error: as sums on the grid are whole numbers k, the release k + round(s·N) is
round(k + s·N), the Gaussian mechanism followed by a rounding that knows nothing of the
data. Whatever the accountant says of the Gaussian holds for it unchanged.

N comes from its distribution function, by one 64-bit word: a sign, and the first 63
bits of a tail probability U, which has infinitely many. float64 decides to which whole
number s·N is nearest, unless its error or the bits not drawn yet could change that.
These cases, about one in a million, are decided by mpmath with 200 bits or more, and
with more bits of U where it takes them.

References:
    Mironov 2012, "On significance of the least significant bits for differential
    privacy". Canonne, Kamath and Steinke 2020, arXiv:2004.00010, for the discrete
    Gaussian, which is another law. Wichura 1988 and Cody 1969, for the functions.
"""

import functools
from collections.abc import Callable

import numpy as np


_RELATIVE_ERROR = 2.0**-48
"""Of `scipy.special.ndtri`: 2⁻⁵⁰ at most where it was compared with mpmath."""

LARGEST_SCALE = 2.0**43
"""The largest s: draws stay below 2⁴⁷."""

MoreBits = Callable[[int, int], int]
"""From the position of a draw and how many words it has had to 64 more secret bits."""


def rounded_normals(words: np.ndarray, scale: float, more: MoreBits) -> np.ndarray:
    """Draw round(s·N), with N standard normal, from uniform words: one for each draw.

    The scale s is from 0 to `LARGEST_SCALE`. `more` gives further bits for a draw that
    64 do not decide. The numbers are the same for the same bits on every machine.
    """
    from scipy.special import ndtri

    sign = 1 - 2 * (words & np.uint64(1)).astype(np.int64)
    tail = words >> np.uint64(1)  # 63 bits: U is in (tail, tail + 1)·2⁻⁶⁴
    probability = (tail.astype(np.float64) + 0.5) * 2.0**-64
    scaled = ndtri(probability)
    scaled *= -scale
    whole = np.rint(scaled)
    # How far s·N may lie from `scaled`. The second term is what half a unit of U's last
    # bit, and rounding U to 53 bits, move N: dN/dU is 1/φ(N), and φ(N) ≥ U/1.26.
    doubt = scaled * _RELATIVE_ERROR
    doubt += scale * (2.0**-52 + 2.0**-64 / probability)
    doubt += np.abs(scaled - whole)
    for place in np.flatnonzero(doubt >= 0.5):
        bits = _Tail(int(tail[place]), functools.partial(more, int(place)))
        whole[place] = _nearest(bits, scale, int(whole[place]))
    return sign * whole.astype(np.int64)


def scale_of(deviation: float, spacing: float) -> float:
    """Return the scale s of noise of a deviation on a grid of a spacing; rounded up."""
    return deviation / spacing * (1 + 2.0**-50)


class _Tail:
    """A tail probability U in (value, value + 1)·2⁻ⁿ, which more bits make narrower."""

    def __init__(self, value: int, more: Callable[[int], int]):
        self.value, self.bits, self._more = value, 64, more

    def extend(self) -> None:
        self.value = (self.value << 64) | self._more(self.bits // 64)
        self.bits += 64


def _nearest(tail: _Tail, scale: float, guess: int) -> int:
    """Return the whole number nearest to s·N, at most a few from a guess."""
    whole = guess
    while whole > 0 and not _beyond(tail, scale, 2 * whole - 1):
        whole -= 1
    while _beyond(tail, scale, 2 * whole + 1):
        whole += 1
    return whole


def _beyond(tail: _Tail, scale: float, twice: int) -> bool:
    """Return whether s·N > twice/2, which is to say U < Q(twice/(2s))."""
    import mpmath

    while True:
        with mpmath.workprec(tail.bits + 136):
            bound = mpmath.mpf(twice) / (2 * mpmath.mpf(scale) * mpmath.sqrt(2))
            place = mpmath.ldexp(mpmath.erfc(bound) / 2, tail.bits) - tail.value
            margin = mpmath.ldexp(1, -64)
            if place <= -margin:
                return False
            if place >= 1 + margin:
                return True
        tail.extend()
