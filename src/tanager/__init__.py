"""tanager: train image models with differential privacy, in JAX.

Names are loaded on first use, so that planning a budget does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tanager._version import __version__ as __version__


if TYPE_CHECKING:
    from tanager import tan as tan
    from tanager.adaptive import AdaptiveClip as AdaptiveClip
    from tanager.adaptive import AdaptiveClipping as AdaptiveClipping
    from tanager.clipping.gradient import ClippedGradient as ClippedGradient
    from tanager.clipping.planning.explain import Explanation as Explanation
    from tanager.clipping.transform import ClippedGrad as ClippedGrad
    from tanager.clipping.transform import clipped_grad as clipped_grad
    from tanager.compiling import compiler_options as compiler_options
    from tanager.compiling import keep_memory as keep_memory
    from tanager.data.grouped import Grouped as Grouped
    from tanager.keys import example_keys as example_keys
    from tanager.noise import GaussianNoise as GaussianNoise
    from tanager.privacy.account import Account as Account
    from tanager.privacy.accountant import epsilon as epsilon
    from tanager.privacy.calibrate import calibrate as calibrate
    from tanager.privacy.ledger import Ledger as Ledger
    from tanager.privacy.mechanism import Adjacency as Adjacency
    from tanager.privacy.mechanism import Mechanism as Mechanism
    from tanager.privacy.plan import Plan as Plan
    from tanager.privacy.risk import Risk as Risk
    from tanager.privacy.risk import risk as risk
    from tanager.sampling import PhysicalBatch as PhysicalBatch
    from tanager.sampling import PoissonSampler as PoissonSampler
    from tanager.seed import Seed as Seed
    from tanager.training.evaluate import Classification as Classification
    from tanager.training.evaluate import ClassResult as ClassResult
    from tanager.training.evaluate import Evaluation as Evaluation
    from tanager.training.export import export as export
    from tanager.training.loop import train as train
    from tanager.training.problem import DPSGD as DPSGD
    from tanager.training.problem import Problem as Problem
    from tanager.training.problem import Runtime as Runtime
    from tanager.training.result import TrainResult as TrainResult
    from tanager.transformation import gaussian_noise as gaussian_noise
    from tanager.use.model import Model as Model
    from tanager.use.model import load as load

_NAMES = {
    "adaptive": ("AdaptiveClip", "AdaptiveClipping"),
    "clipping.gradient": ("ClippedGradient",),
    "clipping.planning.explain": ("Explanation",),
    "clipping.transform": ("ClippedGrad", "clipped_grad"),
    "compiling": ("compiler_options", "keep_memory"),
    "data.grouped": ("Grouped",),
    "keys": ("example_keys",),
    "noise": ("GaussianNoise",),
    "privacy.account": ("Account",),
    "privacy.accountant": ("epsilon",),
    "privacy.calibrate": ("calibrate",),
    "privacy.ledger": ("Ledger",),
    "privacy.mechanism": ("Adjacency", "Mechanism"),
    "privacy.plan": ("Plan",),
    "privacy.risk": ("Risk", "risk"),
    "sampling": ("PhysicalBatch", "PoissonSampler"),
    "seed": ("Seed",),
    "training.evaluate": ("ClassResult", "Classification", "Evaluation"),
    "training.export": ("export",),
    "training.loop": ("train",),
    "training.problem": ("DPSGD", "Problem", "Runtime"),
    "training.result": ("TrainResult",),
    "transformation": ("gaussian_noise",),
    "use.model": ("Model", "load"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = "data", "models", "tan"

__all__ = ["__version__", "tan"]
__all__ += list(_HOMES)  # pyrefly: ignore[unresolvable-dunder-all]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tanager.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tanager' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tanager.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
