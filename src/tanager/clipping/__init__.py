"""Per-example clipping as a transformation of any JAX loss."""

from tanager.clipping.gradient import ClippedGradient as ClippedGradient
from tanager.clipping.planning.choices import STRATEGIES as STRATEGIES
from tanager.clipping.planning.explain import Explanation as Explanation
from tanager.clipping.planning.explain import TapRow as TapRow
from tanager.clipping.rules.factors import STYLES as STYLES
from tanager.clipping.rules.factors import Style as Style
from tanager.clipping.transform import ClippedGrad as ClippedGrad
from tanager.clipping.transform import clipped_grad as clipped_grad
