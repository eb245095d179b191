"""Per-example clipping as a transformation of any JAX loss."""

from tanager.clipping.choices import STRATEGIES as STRATEGIES
from tanager.clipping.explain import Explanation as Explanation
from tanager.clipping.explain import TapRow as TapRow
from tanager.clipping.transform import ClippedGrad as ClippedGrad
from tanager.clipping.transform import ClippedGradient as ClippedGradient
from tanager.clipping.transform import clipped_grad as clipped_grad
