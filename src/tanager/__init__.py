"""tanager: train image models with differential privacy, in JAX.

Names are loaded on first use, so that planning a budget does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tanager._version import __version__ as __version__


if TYPE_CHECKING:
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
    from tanager.privacy import tan as tan
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

_HOMES = {
    "Account": "privacy.account",
    "AdaptiveClip": "adaptive",
    "AdaptiveClipping": "adaptive",
    "Adjacency": "privacy.mechanism",
    "ClassResult": "training.evaluate",
    "Classification": "training.evaluate",
    "ClippedGrad": "clipping.transform",
    "ClippedGradient": "clipping.gradient",
    "DPSGD": "training.problem",
    "Evaluation": "training.evaluate",
    "Explanation": "clipping.planning.explain",
    "GaussianNoise": "noise",
    "Grouped": "data.grouped",
    "Ledger": "privacy.ledger",
    "Mechanism": "privacy.mechanism",
    "Model": "use.model",
    "PhysicalBatch": "sampling",
    "Plan": "privacy.plan",
    "PoissonSampler": "sampling",
    "Problem": "training.problem",
    "Risk": "privacy.risk",
    "Runtime": "training.problem",
    "Seed": "seed",
    "TrainResult": "training.result",
    "calibrate": "privacy.calibrate",
    "clipped_grad": "clipping.transform",
    "compiler_options": "compiling",
    "epsilon": "privacy.accountant",
    "example_keys": "keys",
    "export": "training.export",
    "gaussian_noise": "transformation",
    "keep_memory": "compiling",
    "load": "use.model",
    "risk": "privacy.risk",
    "train": "training.loop",
}
_MODULES = {"data": "data", "models": "models", "tan": "privacy.tan"}

__all__ = ["__version__", "tan"]
__all__ += list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tanager.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tanager' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tanager.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
