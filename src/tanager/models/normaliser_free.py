"""What networks without norms have in common: NF-ResNets and NFNets.

Signals keep their variance by design instead of by statistics (Brock, De and Smith
2021, arXiv:2101.08692, section 3). Every convolution has standardised weights, so that
it keeps the variance of an input of mean square 1. An activation is multiplied by γ, so
that it makes one of N(0, 1). A residual block returns skip + α·f(β·x): the branch f
sees variance 1 because β is one over the standard deviation that x is expected to have,
which grows by α² in each block and is brought back to 1 where a block's skip path goes
through a convolution.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tanager import _validate as validate
from tanager.models import layers


ALPHA = 0.2
"""α of every released network."""

RELU_GAMMA = 1.7139588594436646
GELU_GAMMA = 1.7015043497085571
"""γ as in the released code (deepmind-research, nfnets/base.py), found by sampling. The
paper's section 4 has sqrt(2/(1 − 1/π)) = 1.71286 for the ReLU."""

HEAD_DEVIATION = 0.01
"""Standard deviation of the head's initial weights, as in the released code."""

EPS = 1e-8
"""Of the standardised weights. Where `standardise` has n·(σ² + eps), the released code
has max(n·σ², 1e-4): no difference until an output's weights are nearly all alike."""


class Place(NamedTuple):
    """Channels in and out of a residual block, the stride of one convolution, and β."""

    channels_in: int
    channels_out: int
    stride: int
    beta: float

    @property
    def projects(self) -> bool:
        """Whether the skip path goes through a convolution."""
        return self.stride > 1 or self.channels_in != self.channels_out


def places_of(
    channels: int, depths: Sequence[int], widths: Sequence[int]
) -> Iterator[Place]:
    """Yield the place of every block of stages that return `widths` channels."""
    if len(depths) != len(widths):
        validate.refuse("depths", depths, f"must be {len(widths)} whole numbers")
    variance = 1.0
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        validate.whole(depths=depth, at_least=1)
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            yield Place(channels, width, stride, 1 / math.sqrt(variance))
            if number == 0:
                variance = 1.0
            variance += ALPHA**2
            channels = width


def convolution(eps: float, **options: Any) -> Callable[..., layers.StandardisedConv]:
    """Return a maker of standardised convolutions with gain and bias."""
    form = layers.Standardisation(eps)
    return functools.partial(
        layers.StandardisedConv, gain=True, bias=True, form=form, **options
    )
