"""What `clipped_grad` refuses before work starts, each in one message.

`check_alone` refuses it in other functions of one example as well.
"""

import numbers
import textwrap
import traceback
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager.clipping.analysis.alone import ERROR_IF, is_sequential, needed_by
from tanager.clipping.analysis.jaxprs import is_reference, jaxprs_in, names
from tanager.clipping.analysis.statistics import RefusedLayer, watching


_REFUSED = {
    "custom_vmap_call": "may mix the examples of a batch",
    "call_hi_primitive": "may mix the examples of a batch",
    "noinline": "hides a computation that may mix the examples of a batch",
    "empty": "reads memory in which earlier examples may have left their values",
    "empty_ref": "reads memory in which earlier examples may have left their values",
    "rng_uniform": "draws different numbers each time it is evaluated",
    "stochastic_convert_element_type": "rounds at random",
    "io_callback": "calls the host once per evaluation, not once per example",
    "pure_callback": "calls the host, which may remember earlier examples",
    "buffer_callback": "calls the host, which may remember earlier examples",
}

_REMEDY = (
    "batch normalisation and other cross-example layers break the bound on what one "
    "example contributes; use group or layer normalisation"
)

_MARKS = ("pvary", "pcast")
"""They name axes of a mesh, but exchange no values between devices."""

_DERIVED = {"custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "while", *_MARKS}
"""Their derivatives are not in the program of the loss, and may mix examples."""

_DRAWS = (
    "random_bits",
    "random_fold_in",
    "random_gamma",
    "random_split",
    "rng_bit_generator",
)

_OPTIMIZERS = (
    "flax.nnx.training.optimizer.Optimizer",
    "flax.training.train_state.TrainState",
)


def refuse_ill_defined(jaxpr: Any, what: str = "loss", raises: bool = False) -> None:
    """Refuse operations for which the gradient of one example is not defined.

    `what` names the function. `raises` says that this is the code by which Equinox
    raises an error: by a callback.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in _MARKS and (axes := _mesh_axes(equation.params)):
            raise ValueError(
                f"{what} must not mix examples, but it uses {name} over the axis "
                f"{axes[0]}: {_REMEDY}"
            )
        if name in _DRAWS and _shares_bits(equation):
            raise ValueError(
                f"{what} draws random numbers with a key of the rbg generator, which "
                "gives all rows of a batch the numbers of the first row: use threefry "
                'keys, jax.random.key(seed, impl="threefry2x32")'
            )
        refused = name in _REFUSED and not (raises and name == "pure_callback")
        if refused and not (name == "custom_vmap_call" and is_sequential(equation)):
            raise ValueError(
                f"{what} uses {name}, which {_REFUSED[name]}, so the gradient of one "
                f"example is not defined: remove it from {what}"
            )
        way = equation.params.get("vmap_method")
        if way not in (None, "sequential", "sequential_unrolled"):
            raise ValueError(
                f'{what} uses {name} with vmap_method="{way}", which gives a foreign '
                "function the whole batch, and it may mix its examples: use "
                'vmap_method="sequential"'
            )
        inside = raises or equation.params.get("name") == ERROR_IF
        for inner in jaxprs_in(equation):
            refuse_ill_defined(inner, what, inside)


def _refuse_references(jaxpr: Any, what: str = "loss") -> None:
    """Refuse mutable references made outside a function: they link examples."""
    for variable in jaxpr.constvars:
        if is_reference(variable):
            raise ValueError(
                f"{what} uses a mutable reference ({variable.aval}) made outside it: "
                "what one example writes there, the next one reads. Pass the value as "
                "a constant, or make the reference inside it"
            )


def _mesh_axes(params: dict[str, Any]) -> list[Hashable]:
    """Return the axes over which an equation exchanges values between devices."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return [x for x in axes if x is not None and not isinstance(x, numbers.Integral)]


def _shares_bits(equation: Any) -> bool:
    """Whether all rows draw from the key of the first under `vmap`, as rbg keys do."""
    if equation.primitive.name == "rng_bit_generator":
        return True
    return any("rbg" in str(atom.aval.dtype) for atom in equation.invars)


def check_leaves(trainable: PyTree, fixed: PyTree) -> None:
    """Refuse parameters without a leaf to train, complex or masked ones, and floats.

    A Python float in a dict, list or tuple looks like a parameter and would not be
    trained. Those of modules are settings, such as the rate of a dropout.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(fixed):
        plain = (jax.tree_util.DictKey, jax.tree_util.SequenceKey)
        if isinstance(leaf, float) and all(isinstance(key, plain) for key in path):
            name = f"params{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{name} (={leaf!r}) must be an array: write jnp.asarray({leaf!r}) to "
                "train it, or leave it out of params and use it in the loss as it is"
            )
    for node in jax.tree.leaves((trainable, fixed), is_leaf=_is_optimizer):
        if _is_optimizer(node):
            rule = "must not hold an optimizer, whose state would be trained"
            remedy = "give the model or its parameters, and use the optimizer after "
            validate.refuse_type("params", node, rule, f"{remedy}the noise")
    leaves = jax.tree.leaves(trainable)
    for path, leaf in jax.tree_util.tree_leaves_with_path((trainable, fixed)):
        if isinstance(leaf, np.ma.MaskedArray):
            name = f"params{jax.tree_util.keystr(path[1:])}"
            remedy = "fill it with a value of your choice: array.filled(0)"
            validate.refuse_type(name, leaf, "must have no mask", remedy)
    if not leaves:
        raise ValueError(
            "params must hold at least one floating-point array to train: of an NNX "
            "module, nnx.Param is trained; of any, what trainable does not leave out"
        )
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        raise ValueError(
            "params must be real: write a complex parameter as two real arrays"
        )


def _is_optimizer(node: Any) -> bool:
    """Whether a node is a state of Optax, or an optimizer or train state of Flax."""
    kind = type(node)
    names = [f"{each.__module__}.{each.__name__}" for each in kind.__mro__]
    optax = kind.__module__.startswith("optax.") and isinstance(node, tuple)
    return optax or any(name in _OPTIMIZERS for name in names)


class Read(NamedTuple):
    """What clipping must know of a loss that is not refused.

    Attributes:
        alone: what of it needs its examples one at a time (`alone.needed_by`), or "".
        held: whether it holds a value of an outer `jax.grad` or the like.
    """

    alone: str
    held: bool


def check_loss(
    loss: Callable[[PyTree, PyTree, PyTree], Any],
    trainable: PyTree,
    fixed: PyTree,
    example: PyTree,
    has_aux: bool = False,
) -> Read:
    """Refuse a loss that does not return one number, or that mixes examples.

    `loss` is of the leaves that are trained, of the others, and of an example. With
    `has_aux` it returns (loss, aux).
    """

    def of_leaves(trainable: PyTree, example: PyTree) -> Any:
        return loss(trainable, fixed, example)

    def watched(trainable: PyTree, example: PyTree) -> Any:
        with watching(trainable, fixed):
            return of_leaves(trainable, example)

    try:
        closed, value = _traced(watched, trainable, example)
    except RefusedLayer:
        raise
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # of Flax, which may be absent
            if _in_transform(error):
                raise ValueError(
                    "loss gives a Flax module that was made outside it to nnx.jit or "
                    f"the like, which writes to the module ({error}): give it "
                    "nnx.clone(module), or call the module without nnx.jit. Make the "
                    "module again first: this error may have emptied it"
                ) from error
            raise ValueError(
                f"loss changes a Flax module that was made outside it ({error}): give "
                "the module as params, or write nnx.merge(graph, ..., copy=True)"
            ) from error
        if type(error).__name__ == "ModifyScopeVariableError":  # of linen
            raise ValueError(
                f"loss changes state of a Flax layer ({error}): call it so that "
                "it does not, as with update_stats=False, or name the collection in "
                "apply(..., mutable=[...]) and leave out the state that it returns"
            ) from error
        if _returns_no_array(error):
            kind = str(error).partition("<class '")[2].partition("'")[0]
            raise ValueError(
                f"loss (returning a {kind}) must return one floating-point scalar for "
                "one example, and arrays as aux"
            ) from error
        if _takes_a_batch(of_leaves, trainable, example, has_aux):
            raise ValueError(
                f"loss (failing with {type(error).__name__}) takes a batch, but must "
                "take one example, without a batch axis: call the model on x[None], "
                "and take the loss of row [0] of what it returns (a loss that compares "
                "or mixes examples, or counts over them, does not fit)"
            ) from error
        raise
    _check_result(value, has_aux)
    _refuse_references(closed.jaxpr)
    refuse_ill_defined(closed.jaxpr)
    alone = needed_by(closed.jaxpr)
    if _DERIVED & names(closed.jaxpr.eqns):
        gradient = jax.grad(of_leaves, has_aux=has_aux)
        derived, _ = _traced(gradient, trainable, example)
        _refuse_references(derived.jaxpr)
        refuse_ill_defined(derived.jaxpr)
        alone = alone or needed_by(derived.jaxpr)
    return Read(alone, any(isinstance(each, Tracer) for each in closed.consts))


def _in_transform(error: Exception) -> bool:
    """Whether an error is raised by a transform of NNX, such as `nnx.jit`."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = (frame.f_globals.get("__name__", "") for frame in frames)
    return any(module.startswith("flax.nnx.transforms.") for module in modules)


def _returns_no_array(error: Exception) -> bool:
    """Whether JAX refuses what a function returns, and not what one in it is given."""
    text = str(error)
    return "is not a valid JAX type" in text and not text.startswith("Argument")


def _check_result(value: PyTree, has_aux: bool) -> None:
    """Refuse what a loss returns, unless it is one number, or that and aux."""
    pair = isinstance(value, tuple) and len(value) == 2
    if has_aux and not pair:
        raise ValueError(
            f"loss (returning {_shown(value)}) must return (loss, aux) with "
            "has_aux=True: return both, or leave has_aux out"
        )
    if pair and not has_aux and _is_number(value[0]):
        raise ValueError(
            f"loss (returning {_shown(value)}) must return the loss alone: give "
            "has_aux=True to clipped_grad for the auxiliary results of each example"
        )
    loss = value[0] if has_aux else value
    if not _is_number(loss):
        raise ValueError(
            f"loss (returning {_shown(value)}) must return one floating-point scalar "
            f"for one example: {_number_in(loss)}"
        )


def _number_in(loss: Any) -> str:
    """Return how to make a loss one number."""
    if not isinstance(loss, jax.ShapeDtypeStruct):
        return "return that number alone"
    if loss.shape == ():
        return "take its real part, or cast it to a float"
    if loss.size == 1:
        return "take its one number, loss.reshape(())"
    return "it is called without a batch axis; average views inside it"


def _is_number(value: Any) -> bool:
    one = isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()
    return one and jnp.issubdtype(value.dtype, jnp.floating)


def _shown(value: PyTree) -> str:
    """Return a pytree with the shapes of its arrays in short."""

    def short(leaf: Any) -> str:
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"

    shown = " ".join(str(jax.tree.map(short, value)).replace("'", "").split())
    return textwrap.shorten(shown, 80, placeholder=" …")


def check_transform(transform: Callable[[PyTree], PyTree], gradient: PyTree) -> PyTree:
    """Refuse a transformation of gradients that is not defined for one example.

    It returns the shapes that `transform` makes of those of a gradient.
    """
    try:
        value = check_alone(transform, "transform", gradient)
    except TypeError as error:
        if not _returns_no_array(error):
            raise
        value = None
    leaves = jax.tree.leaves(value)
    if not leaves or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        raise ValueError(
            f"transform (returning {_shown(value)}) must return a pytree of "
            "floating-point arrays: what is clipped instead of the gradient"
        )
    return value


def check_alone(function: Callable, what: str, *arguments: PyTree) -> PyTree:
    """Refuse a function of one example that could see others under `vmap`.

    `what` names it in messages. It returns the shapes of what the function returns.
    """
    closed, value = _traced(function, *arguments, what=what)
    _refuse_references(closed.jaxpr, what)
    refuse_ill_defined(closed.jaxpr, what)
    if name := needed_by(closed.jaxpr):
        raise ValueError(
            f"{what} uses {name}, and may mix examples where they are computed "
            f"together: write it without {name}"
        )
    return value


def _takes_a_batch(
    loss: Callable, trainable: PyTree, example: PyTree, has_aux: bool
) -> bool:
    """Whether a loss returns one number for two examples with a batch axis."""
    two = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), example
    )
    try:
        value = jax.eval_shape(loss, trainable, two)
        value = value[0] if has_aux else value
    except Exception:
        return False
    return isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()


def _traced(
    function: Callable, *arguments: PyTree, what: str = "loss"
) -> tuple[jex.ClosedJaxpr, PyTree]:
    try:
        return jax.make_jaxpr(function, return_shape=True)(*arguments)
    except ValueError as error:
        if "Linearization failed" in str(error):
            raise ValueError(
                f"{what} uses an operation that has no gradient in reverse mode, such "
                "as sequential_vmap with parameters inside: give it a jax.custom_vjp"
            ) from error
        if "Reverse-mode differentiation does not work" not in str(error):
            raise
        raise ValueError(
            f"{what} uses while_loop with parameters inside, which has no gradient in "
            "reverse mode: use scan, or fori_loop with a fixed number of steps"
        ) from error
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"{what} must not mix examples, but it uses a collective ({error}): "
            f"{_REMEDY}"
        ) from error
