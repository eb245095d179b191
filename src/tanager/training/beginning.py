"""Checks before the first charge, so that no step is charged in vain."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager._files import as_json
from tanager.parallel import hosts
from tanager.report.run_files import check_description
from tanager.training.evaluate import Evaluation
from tanager.training.problem import DPSGD, Problem


_AGGREGATE = "DifferentiallyPrivateAggregateState"


def check(
    trained: PyTree, fixed: PyTree, optimizer: Any, expected_batch: float
) -> None:
    """Check what can be checked without an example; see the functions below.

    Args:
        trained: the leaves that are trained.
        fixed: the others.
        optimizer: what was given as an optax transformation.
        expected_batch: the expected batch size.
    """
    check_parameters(trained, fixed)
    check_optimizer(optimizer, trained)
    check_batch(expected_batch)


def check_settings() -> None:
    """Refuse settings of JAX by which one example can stop a run.

    Raises:
        ValueError: JAX raises an error where it meets a NaN or an infinity.
    """
    for name in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, name):
            validate.refuse(
                name,
                True,
                "must be off: the run would stop at an example whose gradient is not "
                "finite, and tell by it that this example was sampled",
                f"leave out {name.upper()}; such an example counts for nothing",
            )


def try_out(
    model: PyTree,
    evaluate: Callable[[PyTree], Evaluation] | None,
    finish: Callable[[PyTree], PyTree],
) -> None:
    """Call the functions of a run that are next called when steps were charged.

    It costs one evaluation.

    Args:
        model: of the first parameters.
        evaluate: of the run, or None.
        finish: of the run.

    Raises:
        ValueError: one of them fails, or `evaluate` returns something else.
    """
    if evaluate is not None:
        with trying("evaluate"):
            found = evaluate(model)
        if not isinstance(found, Evaluation):
            kind = type(found).__name__
            remedy = "tanager.Classification makes such a function"
            validate.refuse("evaluate", kind, "must return an Evaluation", remedy)
    with trying("finish"):
        finish(model)


def check_parameters(trained: PyTree, fixed: PyTree) -> None:
    """Refuse initial parameters that are not finite, and fixed ones that are NaN.

    Args:
        trained: the leaves that are trained.
        fixed: the others, which may hold an infinite mask.

    Raises:
        ValueError: a leaf holds such a number; the message gives its place.
    """
    fixed = eqx.filter(fixed, eqx.is_inexact_array)
    if not all(_are_sound((trained, fixed))):
        for path, leaf in jax.tree_util.tree_leaves_with_path((trained, fixed)):
            of_trained = path[0].idx == 0
            array = np.asarray(leaf)
            odd = ~np.isfinite(array) if of_trained else np.isnan(array)
            if odd.any():
                validate.refuse(
                    f"params{jax.tree_util.keystr(path[1:])}",
                    float(array[odd].flat[0]),
                    "must be finite",
                    "give other initial parameters",
                )


@jax.jit
def _are_sound(trees: tuple[PyTree, PyTree]) -> list[jax.Array]:
    trained, fixed = trees
    sound = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(trained)]
    return sound + [~jnp.any(jnp.isnan(leaf)) for leaf in jax.tree.leaves(fixed)]


def check_optimizer(optimizer: Any, params: PyTree) -> None:
    """Refuse an optimizer that cannot make a step from a private gradient alone.

    Args:
        optimizer: what was given as an optax transformation.
        params: the trained leaves.

    Raises:
        ValueError: it is no transformation, needs more than the gradient, privatises
            gradients itself, or changes the shape of parameters or of its own state.
    """
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    if not all(callable(getattr(optimizer, of, None)) for of in ("init", "update")):
        remedy = "give one, such as optax.sgd(0.1)"
        if hasattr(optimizer, "tx"):
            remedy = "give its `tx`, which is one"
        elif callable(optimizer):
            remedy = "call it, as in optax.sgd(0.1)"
        validate.refuse("optimizer", name, "must be an optax transformation", remedy)

    before = _shapes_of(name, optimizer.init, params)
    if any(map(_is_aggregate, jax.tree.leaves(before, is_leaf=_is_aggregate))):
        validate.refuse(
            "optimizer",
            name,
            "clips and adds noise, and tanager already clips and adds noise",
            "give the optimizer alone, such as optax.sgd(0.1)",
        )

    def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        gradient = jax.tree.map(jnp.zeros_like, params)
        updates, after = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), after

    stepped, after = _shapes_of(name, step, params, before)
    if _shapes(stepped) != _shapes(params):
        _refuse(name, "changes the shapes or types of the parameters")
    if _shapes(after) != _shapes(before):
        _refuse(name, "changes the shapes or types of its own state")


def check_batch(expected: float) -> None:
    """Warn where most batches are empty.

    Args:
        expected: batch size.
    """
    if expected < 1:
        warnings.warn(
            f"the expected batch size is {expected:.3g}, below one example: most steps "
            "add noise to an empty batch; raise the sample rate",
            stacklevel=4,
        )


@contextlib.contextmanager
def trying(what: str) -> Iterator[None]:
    """Say of an error in the block that it came before a step was charged.

    Args:
        what: the name of the argument that is tried.

    Raises:
        ValueError: in place of any error but a lack of memory.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ValueError(
            f"{what} fails before the next step ({type(error).__name__}: {error}): "
            "mend it; no step was charged for this"
        ) from error


def _is_aggregate(node: Any) -> bool:
    return type(node).__name__ == _AGGREGATE


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves = [(leaf.shape, leaf.dtype) for leaf in map(_shaped, jax.tree.leaves(tree))]
    return jax.tree.structure(tree), leaves


def _shaped(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _shapes_of(name: str, function: Callable, *arguments: PyTree) -> Any:
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        needed = str(error).partition("keyword-only")[2].partition(":")[2].strip()
        if isinstance(error, TypeError) and needed:
            _refuse(
                name,
                f"needs {needed} besides the gradient, which would reveal private "
                "examples",
            )
        first = (str(error) or "no message").splitlines()[0]
        _refuse(name, f"fails on these parameters ({type(error).__name__}: {first})")


def _refuse(name: str, what: str) -> NoReturn:
    validate.refuse("optimizer", name, what, "use another, such as optax.sgd or adam")


def as_description(description: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a description as config.json will hold it.

    Raises:
        ValueError: it is not JSON, or the report could not show it.
    """
    try:
        described = as_json(description or {})
        check_description(described)
        return described
    except TypeError as error:
        raise ValueError(
            f"description must be JSON: {error}; give text, numbers, lists and dicts"
        ) from error


def check_hosts(out: str | Path | None, examples: int) -> None:
    """Refuse several hosts that share no folder, or are more than the examples."""
    if hosts.count() == 1:
        return
    if out is None:
        validate.refuse(
            "out", out, "must be given on several hosts", "it holds what they share"
        )
    if examples < hosts.count():
        validate.refuse(
            "hosts",
            hosts.count(),
            "must be at most the number of examples",
            "train on fewer hosts",
        )


def check_views(problem: Problem, algorithm: DPSGD) -> None:
    """Refuse views without an augmentation, and an augmentation without views."""
    multiplicity = algorithm.augmentation_multiplicity
    if (problem.augment is None) != (multiplicity == 0):
        validate.refuse(
            "augmentation_multiplicity",
            multiplicity,
            "must be at least 1 with `augment` and 0 without",
        )


def check_guarantee(algorithm: DPSGD, examples: int) -> None:
    """Refuse a guarantee that cannot be given, and warn of one that says little.

    Args:
        algorithm: of the run.
        examples: the public size.
    """
    delta, noise = algorithm.delta, algorithm.mechanism.noise_multiplier
    if delta >= 1 / examples:
        warnings.warn(
            f"delta (={delta:g}) is at least 1/{examples}: a mechanism that publishes "
            "one whole example would satisfy it; choose a smaller one",
            stacklevel=3,
        )
    if algorithm.clip_norm is None and noise > 0:
        validate.refuse(
            "clip_norm",
            None,
            f"must be a number with noise of multiplier {noise:g}",
            "noise only protects clipped gradients; the papers use 1.0",
        )
    if algorithm.clip_norm is None:
        warnings.warn(
            "this run is NOT PRIVATE: gradients are neither clipped nor noised, and "
            "the model may tell of every image it saw; train on public data only",
            stacklevel=3,
        )
        return
    check_settings()
    if noise == 0:
        warnings.warn("noise_multiplier is 0: this run is not private", stacklevel=3)
