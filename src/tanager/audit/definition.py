"""What a private run must add up, by the definition of DP-SGD, example by example."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from tanager.adaptive import AdaptiveClipping
from tanager.data import augment as augmentation
from tanager.data import gather
from tanager.keys import derive_keys
from tanager.sampling import PoissonSampler
from tanager.seed import Seed
from tanager.training.problem import DPSGD, Problem


class Definition(NamedTuple):
    """What must be added up in each step.

    Attributes:
        sums: Σᵢ clip_C(gᵢ)/C over the examples that must be sampled, float64[steps, d].
        norms: their ‖gᵢ‖, an array for each step.
    """

    sums: np.ndarray
    norms: list[np.ndarray]

    def counts(self, clip_norms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return Σ(b − ½) of each step, and how many norms are too close to C to say.

        b is 1 where a norm is at most C. A run rounds norms up.
        """
        pairs = [*zip(self.norms, clip_norms, strict=False)]
        below = [np.sum(norms <= most) - len(norms) / 2 for norms, most in pairs]
        close = [np.sum(np.abs(norms / most - 1) < 2e-3) for norms, most in pairs]
        return np.array(below), np.array(close)


def released_counts(
    adaptive: AdaptiveClipping, clip_norms: np.ndarray, batch_size: float
) -> np.ndarray:
    """Return the counts Σ(b − ½), with noise, that move C from step to step."""
    moved = np.diff(np.log(clip_norms)) / adaptive.learning_rate
    return (adaptive.quantile - moved - 0.5) * batch_size


def by_definition(
    problem: Problem, algorithm: DPSGD, secret: Seed, clip_norms: np.ndarray
) -> Definition:
    """Return what the run with this secret must add up, given C of each step.

    In automatic style clip_C(g) is C·g/(‖g‖ + γ).
    """
    source, run = problem.source(), algorithm.mechanism
    style = algorithm.clipping_style
    groups, size = problem.groups, problem.size()
    sampler = PoissonSampler(run, size, secret, size, groups)
    trained, fixed = problem.split()
    loss, augment = problem.loss, problem.augment

    def mean_loss(trained: PyTree, example: Any, key: jax.Array) -> Array:
        model = eqx.combine(trained, fixed)
        if augment is None:
            return loss(model, example)
        multiplicity = algorithm.augmentation_multiplicity
        views = augmentation.views(augment, key, example, multiplicity)
        return jnp.mean(jax.vmap(lambda view: loss(model, view))(views))

    @jax.jit
    def gradient(trained: PyTree, example: Any, key: jax.Array) -> Array:
        return ravel_pytree(jax.grad(mean_loss)(trained, example, key))[0]

    sums, norms = [], []
    for step in range(run.steps):
        key = derive_keys(secret, "augmentation", step)[0]
        total = np.zeros(sum(leaf.size for leaf in jax.tree.leaves(trained)))
        found = []
        for index in sampler.indices(step):
            used = np.array([index])
            if groups is not None:
                mask, indices = groups.choose(secret, step, used)
                used = indices[mask]
            each = []
            for row in used:
                one = jax.tree.map(
                    lambda leaf: jnp.asarray(leaf[0]), gather(source, np.array([row]))
                )
                own = gradient(trained, one, jax.random.fold_in(key, int(row)))
                each.append(np.asarray(own, np.float64))
            flat = np.mean(each, axis=0)
            norm = float(np.linalg.norm(flat))
            automatic = style.name == "automatic"
            most = norm + style.gamma if automatic else max(clip_norms[step], norm)
            total += flat / most
            found.append(norm)
        sums.append(total)
        norms.append(np.array(found))
    return Definition(np.stack(sums), norms)
