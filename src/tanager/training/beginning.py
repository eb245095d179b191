"""Check a run before its first charge, so that no step is charged in vain."""

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
    problem: Problem, algorithm: DPSGD, examples: int, out: str | Path | None
) -> None:
    """Refuse a run that cannot work, and warn of one that protects or learns little.

    Args:
        problem: what is learned.
        algorithm: how.
        examples: how many there are.
        out: the run's folder, or None.

    Raises:
        ValueError: the run cannot work.
    """
    public = algorithm.public_size(examples)
    multiplicity = algorithm.augmentation_multiplicity
    expected = algorithm.mechanism.sample_rate * public
    _check_guarantee(algorithm, public)
    if (problem.augment is None) != (multiplicity == 0):
        validate.refuse(
            "augmentation_multiplicity",
            multiplicity,
            "must be at least 1 with `augment` and 0 without",
        )
    if hosts.count() > 1 and out is None:
        validate.refuse(
            "out", out, "must be given on several hosts", "they share its files"
        )
    if examples < hosts.count():
        validate.refuse(
            "hosts",
            hosts.count(),
            "must be at most the number of examples",
            "train on fewer hosts",
        )
    trained, fixed = problem.split()
    check_parameters(trained, fixed)
    check_optimizer(algorithm.optimizer, trained)
    if expected < 1:
        warnings.warn(
            f"the expected batch size is {expected:.3g}, below one example: most steps "
            "add noise to an empty batch; raise the sample rate",
            stacklevel=3,
        )


def _check_guarantee(algorithm: DPSGD, public: int) -> None:
    delta, noise = algorithm.delta, algorithm.mechanism.noise_multiplier
    if delta >= 1 / public:
        warnings.warn(
            f"delta (={delta:g}) is at least 1/{public}: a mechanism that publishes "
            "one whole example would satisfy it; choose a smaller one",
            stacklevel=4,
        )
    if algorithm.clip_norm is None:
        if noise > 0:
            validate.refuse(
                "clip_norm",
                None,
                f"must be a number with noise multiplier {noise:g}",
                "noise only protects clipped gradients; the papers use 1.0",
            )
        warnings.warn(
            "this run is NOT PRIVATE: gradients are not clipped and get no noise, so "
            "the model can reveal every image it saw; train on public data only",
            stacklevel=4,
        )
        return
    for name in ("jax_debug_nans", "jax_debug_infs"):
        if getattr(jax.config, name):
            validate.refuse(
                name,
                True,
                "must be off: otherwise an example whose gradient is not finite stops "
                "the run, which reveals that it was sampled",
                f"unset {name.upper()}; such an example counts as zero",
            )
    if noise == 0:
        warnings.warn("noise_multiplier is 0: this run is not private", stacklevel=4)


def try_out(
    model: PyTree,
    evaluate: Callable[[PyTree], Evaluation] | None,
    finish: Callable[[PyTree], PyTree],
) -> None:
    """Call the functions that a run calls next only after steps were charged.

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
        ValueError: it is not a transformation, needs more than the gradient,
            privatises gradients itself, or changes the shape of parameters or of its
            own state.
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


@contextlib.contextmanager
def trying(what: str) -> Iterator[None]:
    """Turn an error in the block into one that says that no step was charged.

    Args:
        what: the name of the argument that is tried.

    Raises:
        ValueError: instead of any error except a lack of memory.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ValueError(
            f"{what} fails before the next step ({type(error).__name__}: {error}): "
            "correct it; no step was charged"
        ) from error


def _is_aggregate(node: Any) -> bool:
    return type(node).__name__ == _AGGREGATE


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda tree: tree, tree))
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


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
