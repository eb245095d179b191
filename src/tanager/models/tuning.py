"""What to train of a pretrained model: everything, the head, or few parameters.

Few trained parameters get little noise: the noise on a gradient grows with the square
root of their number. Every choice trains the head, which is new.

| name | trained besides the head |
|---|---|
| `all` | everything |
| `last-layer` | nothing |
| `last-stage` | the last blocks, and what comes after them |
| `biases-and-norms` | every bias, and all scales and gains of channels |
| `film` | a scale and a shift of each channel: of norms, or of gains without norms |
| `lora` | two thin matrices beside each linear layer and convolution of the blocks |

`biases-and-norms` is BitFit (Ben Zaken et al. 2022, arXiv:2106.10199; privately: Bu et
al. 2022, arXiv:2210.00036) with the norms. `film` is Perez et al. 2018
(arXiv:1709.07871) as Tobaben et al. 2023 (arXiv:2302.01190) fine-tune privately: a
model that normalises trains the norms' own scale and shift, and leaves the factors
of its residual branches. `lora` is Hu et al. 2021
(arXiv:2106.09685), privately as Yu et al. 2022 (arXiv:2110.06500); see
`tanager.models.low_rank`.
"""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.low_rank import with_low_rank
from tanager.models.model import StagedModel


FINE_TUNING = ("all", "last-layer", "last-stage", "biases-and-norms", "film", "lora")
"""The choices of `fine_tune`."""

_TRAINED = {
    "biases-and-norms": (("bias", "scale", "gain"), ()),
    "film": (("scale", "bias"), ("scale",)),
    "film without norms": (("gain", "bias"), ("gain",)),
    "lora": (("down", "up"), ("down", "up")),
}
"""Names of trained leaves, and of the arrays that the module must have beside them."""

Model = TypeVar("Model", bound=eqx.Module)


def with_zero_head(model: Any) -> Any:
    """Set a model's head to 0, and with it all logits."""
    zeros = jax.tree.map(jnp.zeros_like, model.head)
    return eqx.tree_at(lambda tree: tree.head, model, zeros)


def fine_tune(
    model: Model, what: str, *, key: PRNGKeyArray, rank: int = 8, alpha: float = 16.0
) -> tuple[Model, PyTree]:
    """Return a model ready to be fine-tuned, and which of its leaves to train.

    Args:
        model: with a linear layer called ``head``.
        what: one of `FINE_TUNING`.
        key: JAX key of the low-rank matrices.
        rank: r of ``"lora"``, at least 1.
        alpha: α of ``"lora"``: the product counts α/r times.

    Returns:
        The model (under ``"lora"`` with `LowRankLinear` and `LowRankConv` in place of
        the layers of its blocks), and a pytree of booleans like it, for
        `tanager.train`.

    Raises:
        ValueError: an unknown choice, a rank or α out of range, a model without a head,
            or one that has no such parameters.
    """
    validate.one_of(FINE_TUNING, fine_tune=what)
    validate.whole(rank=rank, at_least=1)
    validate.positive(alpha=alpha)
    kind = type(model).__name__
    if not isinstance(getattr(model, "head", None), layers.Linear):
        remedy = "mark the leaves to train yourself: tanager.train(trainable=...)"
        rule = "must have a linear layer called head"
        validate.refuse_type("model", model, rule, remedy)
    if what == "lora":
        model = with_low_rank(model, rank, alpha, key=key)
    late: set[int] = set()
    if what == "last-stage":
        if not isinstance(model, StagedModel):
            rule, remedy = f"is not marked in {kind}", "use all or last-layer"
            validate.refuse("fine_tune", what, rule, remedy)
        late = {id(leaf) for leaf in jax.tree.leaves(model.last_stage)}
    leaves = _leaves(model)
    if what == "film" and not any(_has(owner, ("scale",)) for _, owner, _ in leaves):
        what = "film without norms"
    names, beside = _TRAINED.get(what, ((), ()))
    marks = [
        eqx.is_inexact_array(leaf)
        and (
            what == "all"
            or path[0] == "head"
            or id(leaf) in late
            or (path[-1] in names and _has(owner, beside))
        )
        for path, owner, leaf in leaves
    ]
    heads = sum(path[0] == "head" for path, _, _ in leaves)
    if names and sum(marks) <= heads:
        rule, remedy = f"needs parameters that {kind} lacks", "use all or last-layer"
        validate.refuse("fine_tune", what.partition(" ")[0], rule, remedy)
    return model, jax.tree.unflatten(jax.tree.structure(model), marks)


def _has(owner: Any, names: tuple[str, ...]) -> bool:
    return all(eqx.is_array(getattr(owner, name, None)) for name in names)


def _leaves(model: Any) -> list[tuple[tuple[str, ...], Any, Any]]:
    """Return the path of each leaf of a model, the module that owns it, and it."""
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model):
        owner = model
        for key in keys[:-1]:
            if isinstance(key, jax.tree_util.GetAttrKey):
                owner = getattr(owner, key.name)
            else:
                owner = owner[getattr(key, "idx", getattr(key, "key", None))]
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        found.append((path, owner, leaf))
    return found
