"""What `clipped_grad` refuses before work starts, each in one message."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree


_REFUSED = {
    "custom_vmap_call": "may mix the examples of a batch as its author pleases",
    "rng_uniform": "draws other numbers each time it is evaluated",
    "stochastic_convert_element_type": "rounds at random",
    "io_callback": "calls the host, once per evaluation and not once per example",
    "outside_call": "calls the host, once per evaluation and not once per example",
}

_MARKS = ("pvary", "pcast", "pbroadcast")
"""They name a mesh's axes, but no device meets another's values in them."""


def refuse_ill_defined(jaxpr: Any) -> None:
    """Refuse by name what makes per-example gradients ill defined.

    Raises:
        ValueError: host callbacks with side effects or that see a whole batch,
            operations whose result is another each time, collectives, or batching rules
            that may mix examples.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name not in _MARKS and (axes := _mesh_axes(equation.params)):
            raise ValueError(
                f"loss must not mix examples, but it uses {name} over the axis "
                f"{axes[0]}: batch normalisation and other cross-example layers break "
                "the bound on what one example contributes; use group or layer "
                "normalisation"
            )
        if name == "pure_callback":
            way = equation.params.get("vmap_method")
            if way not in (None, "sequential", "sequential_unrolled"):
                raise ValueError(
                    f'loss uses pure_callback with vmap_method="{way}", by which the '
                    "host sees a whole batch and may mix its examples: use "
                    '"sequential"'
                )
        if name in _REFUSED:
            raise ValueError(
                f"loss uses {name}, which {_REFUSED[name]}, so that the gradient of "
                "one example is not defined: take it out of the loss"
            )
        for inner in jex.jaxprs_in_params(equation.params):
            refuse_ill_defined(getattr(inner, "jaxpr", inner))


def _mesh_axes(params: dict[str, Any]) -> list[str]:
    """Return the names of the axes over which an equation meets other devices."""
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return [axis for axis in axes if isinstance(axis, str)]


def rows_of(batch: PyTree) -> int:
    """Return the rows of a physical batch; raise `ValueError` where leaves differ."""
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            f"batch must be a pytree of arrays that share one leading axis of rows; "
            f"found leading axes {sorted(sizes)}"
        )
    return sizes.pop()[0]


def check_leaves(trainable: PyTree) -> None:
    """Refuse parameters of which none can be trained, and complex ones."""
    leaves = jax.tree.leaves(trainable)
    if not leaves:
        raise ValueError("params must hold at least one floating-point array to train")
    if any(jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in leaves):
        raise ValueError(
            "params must be real: write a complex parameter as two real arrays"
        )


def check_loss(loss: Callable, trainable: PyTree, example: PyTree) -> None:
    """Refuse a loss that is not one number for one example, or that mixes examples."""
    try:
        traced = jax.make_jaxpr(loss, return_shape=True)
        closed, value = traced(trainable, example)
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise ValueError(
            f"loss must not mix examples, but it uses a collective ({error}): batch "
            "normalisation and other cross-example layers break the bound on what one "
            "example contributes; use group or layer normalisation"
        ) from error
    ok = isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()
    if not ok or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"loss (returning {value}) must return one floating-point scalar for one "
            "example: it is called without a batch axis; average views inside it"
        )
    refuse_ill_defined(closed.jaxpr)


def refuse_cross_example_layers(params: PyTree) -> None:
    """Refuse layers of Equinox that keep statistics across examples."""

    def is_module(node):
        return isinstance(node, eqx.nn.BatchNorm | eqx.nn.SpectralNorm)

    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_module):
        if is_module(node):
            where = jax.tree_util.keystr(path) or "params"
            raise ValueError(
                f"params{where} (={type(node).__name__}) keeps statistics across "
                "examples, which breaks the bound on what one example contributes: "
                "use group or layer normalisation"
            )
