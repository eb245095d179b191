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
from tanager.clipping.analysis.refusals import check_leaves
from tanager.data import ArraySource, Source
from tanager.data.source import unfolded
from tanager.parallel import hosts
from tanager.privacy.plan import delta_warning
from tanager.report.run_files import check_description
from tanager.training.class_weights import labels_of
from tanager.training.evaluate import Classification, Evaluation
from tanager.training.problem import DPSGD, Problem


_INPUTS = ("data['image']", "data['features']")
_ROWS = 4096  # looked at together
_PRIVATE = "DifferentiallyPrivateAggregateState", "GaussianNoiseState"


def check(
    problem: Problem, algorithm: DPSGD, examples: int, out: str | Path | None
) -> None:
    """Refuse a run that cannot work, and warn of one that protects or learns little."""
    public = algorithm.public_size(examples)
    multiplicity = algorithm.augmentation_multiplicity
    expected = algorithm.mechanism.sample_rate * public
    _check_guarantee(algorithm, public)
    if (problem.augment is None) != (multiplicity == 0):
        rule = "must be at least 1 with `augment` or a loss that takes a key, else 0"
        validate.refuse("augmentation_multiplicity", multiplicity, rule)
    count = hosts.count()
    if count > 1 and out is None:
        rule = "must be given on several hosts"
        validate.refuse("out", out, rule, "they share its files")
    if examples < count:
        rule = "must be at most the number of examples"
        validate.refuse("hosts", count, rule, "train on fewer hosts")
    if (problem.labels is None) != (algorithm.class_counts is None):
        rule = "must be given with the labels of the problem, and only with them"
        remedy = "see tanager.training.class_weights.balanced"
        validate.refuse("class_counts", algorithm.class_counts, rule, remedy)
    if problem.labels is not None:
        labels_of(problem)
    trained, fixed = problem.split()
    check_leaves(trained, fixed)
    check_parameters(trained, fixed)
    check_optimizer(algorithm.optimizer, trained)
    if expected < 1:
        warnings.warn(
            f"the expected batch size is {expected:.3g}, below one example: most steps "
            "add noise to an empty batch; raise the sample rate",
            stacklevel=4,
        )


def check_examples(
    source: Source, evaluate: Callable[[PyTree], Evaluation] | None
) -> None:
    """Refuse images and features in memory that are not finite, and labels of no class.

    The first would add nothing to the model, and the others, −1 too, pull it to another
    class. Images are floats with four axes or more, and what is called so. The numbers
    of other leaves are left to the loss, which may mask them.
    """
    base, rows = unfolded(source)
    if not isinstance(base, ArraySource):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(base.tree):
        name, wrong = f"data{jax.tree_util.keystr(path)}", 0
        floats = jnp.issubdtype(leaf.dtype, jnp.floating)
        if floats and (leaf.ndim > 3 or name in _INPUTS):
            for start in range(0, len(rows), _ROWS):
                part = leaf[rows[start : start + _ROWS]]
                finite = np.isfinite(part).reshape(len(part), -1)
                wrong += int(np.count_nonzero(~finite.all(axis=1)))
            _refuse_some(name, leaf, rows, wrong, "has NaN or infinity", "mend them")
        elif name == "data['label']" and isinstance(evaluate, Classification):
            last, found = len(evaluate.classes) - 1, leaf[rows]
            if found.ndim == 1 and found.dtype.kind in "iu":
                wrong = int(np.count_nonzero((found < 0) | (found > last)))
            remedy = f"number the classes from 0 to {last}"
            _refuse_some(name, leaf, rows, wrong, "names no class", remedy)


def _refuse_some(
    name: str, leaf: Any, rows: np.ndarray, wrong: int, what: str, remedy: str
) -> None:
    if wrong:
        rule = f"{what} in {wrong} of {len(rows)} examples"
        validate.refuse(name, leaf, rule, f"{remedy}, or leave these examples out")


def _check_guarantee(algorithm: DPSGD, public: int) -> None:
    delta, noise = algorithm.delta, algorithm.mechanism.noise_multiplier
    if delta * public >= 1 and (text := delta_warning(delta, public)):
        warnings.warn(text, stacklevel=5)
    if algorithm.clip_norm is None:
        if noise > 0:
            rule = f"must be a number with noise multiplier {noise:g}"
            remedy = "noise only protects clipped gradients; the papers use 1.0"
            validate.refuse("clip_norm", None, rule, remedy)
        warnings.warn(
            "this run is NOT PRIVATE: gradients are not clipped and get no noise, so "
            "the model can reveal every image it saw; train on public data only",
            stacklevel=5,
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
        warnings.warn("noise_multiplier is 0: this run is not private", stacklevel=5)


def try_out(
    model: PyTree,
    evaluate: Callable[[PyTree], Evaluation] | None,
    finish: Callable[[PyTree], PyTree],
) -> None:
    """Call the functions that a run calls next only after steps were charged."""
    if evaluate is not None:
        with _trying("evaluate"):
            found = evaluate(model)
        if not isinstance(found, Evaluation):
            remedy = "tanager.Classification makes such a function"
            rule = "must be an Evaluation"
            validate.refuse_type("what evaluate returns", found, rule, remedy)
    with _trying("finish"):
        finish(model)


def check_parameters(trained: PyTree, fixed: PyTree) -> None:
    """Refuse trained leaves that are not finite, and fixed ones that are NaN.

    Fixed leaves may hold an infinite mask.
    """
    fixed = eqx.filter(fixed, eqx.is_inexact_array)
    for path, leaf in jax.tree_util.tree_leaves_with_path((trained, fixed)):
        array = np.asarray(leaf)
        odd = ~np.isfinite(array) if path[0].idx == 0 else np.isnan(array)
        if odd.any():
            validate.refuse(
                f"params{jax.tree_util.keystr(path[1:])}",
                float(array[odd].flat[0]),
                "must be finite",
                "give other initial parameters",
            )


def check_optimizer(optimizer: Any, params: PyTree) -> None:
    """Refuse an optimizer that cannot make a step from a private gradient alone."""
    if not all(callable(getattr(optimizer, of, None)) for of in ("init", "update")):
        remedy = "give one, such as optax.sgd(0.1)"
        if hasattr(optimizer, "tx"):
            remedy = "give its `tx`, which is one"
        elif callable(optimizer):
            remedy = "call it, as in optax.sgd(0.1)"
        rule = "must be an optax transformation"
        validate.refuse_type("optimizer", optimizer, rule, remedy)

    before = _shapes_of(optimizer, optimizer.init, params)
    if any(state in str(jax.tree.structure(before)) for state in _PRIVATE):
        rule = "clips or adds noise, and tanager already clips and adds noise"
        remedy = "give the optimizer alone, such as optax.sgd(0.1)"
        validate.refuse_type("optimizer", optimizer, rule, remedy)

    def step(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        gradient = jax.tree.map(jnp.zeros_like, params)
        updates, after = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), after

    stepped, after = _shapes_of(optimizer, step, params, before)
    if _shapes(stepped) != _shapes(params):
        _refuse(optimizer, "changes the shapes or types of the parameters")
    if _shapes(after) != _shapes(before):
        _refuse(optimizer, "changes the shapes or types of its own state")


@contextlib.contextmanager
def _trying(what: str) -> Iterator[None]:
    """Turn an error in the block into one that says that no step was charged."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        raise ValueError(
            f"{what} fails before the next step ({type(error).__name__}: {error}): "
            "correct it; no step was charged"
        ) from error


def _shapes(tree: PyTree) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(jax.eval_shape(lambda tree: tree, tree))
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _shapes_of(optimizer: Any, function: Callable, *arguments: PyTree) -> Any:
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        needed = str(error).partition("keyword-only")[2].partition(":")[2].strip()
        if isinstance(error, TypeError) and needed:
            what = f"needs {needed} besides the gradient"
            _refuse(optimizer, f"{what}, which would reveal private examples")
        first = (str(error) or "no message").splitlines()[0]
        what = f"fails on these parameters ({type(error).__name__}: {first})"
        _refuse(optimizer, what)


def _refuse(optimizer: Any, what: str) -> NoReturn:
    remedy = "use another, such as optax.sgd or adam"
    validate.refuse_type("optimizer", optimizer, what, remedy)


def as_description(description: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a description as config.json will hold it."""
    try:
        described = as_json(description or {})
        check_description(described)
        return described
    except TypeError as error:
        raise ValueError(
            f"description must be JSON: {error}; give text, numbers, lists and dicts"
        ) from error
