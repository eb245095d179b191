"""What to train of a pretrained model: everything, the head, or few parameters.

Few trained parameters get little noise: the noise on a gradient grows with the square
root of their number. Every choice trains the head, which is new.

| name | trained besides the head |
|---|---|
| `all` | everything |
| `last-layer` | nothing |
| `biases-and-norms` | every bias, and the scales and gains of norms and convolutions |
| `film` | a scale and a shift of each channel: of norms, or of gains without norms |
| `lora` | two thin matrices beside each linear layer and convolution of the blocks |

`biases-and-norms` is BitFit (Ben Zaken et al. 2022, arXiv:2106.10199; privately: Bu et
al. 2022, arXiv:2210.00036) with the norms. `film` is Perez et al. 2018
(arXiv:1709.07871) as Tobaben et al. 2023 (arXiv:2302.01190) fine-tune privately: a
model that normalises trains the norms' own scale and shift. `lora` is Hu et al. 2021
(arXiv:2106.09685), privately as Yu et al. 2022 (arXiv:2110.06500); see
`tanager.models.low_rank`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers
from tanager.models.low_rank import LowRankConv, LowRankLinear, with_low_rank


FINE_TUNING = ("all", "last-layer", "biases-and-norms", "film", "lora")
"""The choices of `fine_tune`."""

_NORM_LEAVES = ("scale", "gain")
Model = TypeVar("Model", bound=eqx.Module)


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
    old_head = getattr(model, "head", None)
    if not isinstance(old_head, layers.Linear):
        validate.refuse(
            "model",
            type(model).__name__,
            "must have a linear layer called head",
            "mark the leaves to train yourself: tanager.train(trainable=...)",
        )
    if what == "lora":
        model = with_low_rank(model, rank, alpha, key=key)
    chosen = {
        "all": lambda path, owner: True,
        "last-layer": lambda path, owner: False,
        "biases-and-norms": _bias_or_norm,
        "film": _film(model),
        "lora": lambda path, owner: (
            isinstance(owner, LowRankLinear | LowRankConv)
            and path[-1] in ("down", "up")
        ),
    }[what]
    marked = _mark(model, chosen)
    beyond_head = eqx.tree_at(
        lambda tree: tree.head, marked, jax.tree.map(lambda _: False, marked.head)
    )
    if what not in ("all", "last-layer") and not any(jax.tree.leaves(beyond_head)):
        validate.refuse(
            "fine_tune",
            what,
            f"needs parameters that {type(model).__name__} does not have",
            "use all or last-layer",
        )
    head = jax.tree.map(eqx.is_inexact_array, old_head)
    return model, eqx.tree_at(lambda tree: tree.head, marked, head)


def _bias_or_norm(path: tuple[str, ...], owner: Any) -> bool:
    return path[-1] == "bias" or path[-1] in _NORM_LEAVES


def _film(model: Any) -> Callable[[tuple[str, ...], Any], bool]:
    owners = [owner for _, owner, _ in _leaves(model) if hasattr(owner, "scale")]
    normalises = any(eqx.is_array(owner.scale) for owner in owners)

    def chosen(path: tuple[str, ...], owner: Any) -> bool:
        if normalises:
            scaled = eqx.is_array(getattr(owner, "scale", None))
            return scaled and path[-1] in ("scale", "bias")
        return getattr(owner, "gain", None) is not None and path[-1] in ("gain", "bias")

    return chosen


def _leaves(model: Any) -> list[tuple[tuple[str, ...], Any, Any]]:
    """Return the path of each array of a model, the module that owns it, and it."""
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model):
        owner = model
        for key in keys[:-1]:
            name = getattr(key, "name", None)
            owner = (
                getattr(owner, name)
                if name is not None
                else owner[getattr(key, "idx", getattr(key, "key", None))]
            )
        path = tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)
        found.append((path, owner, leaf))
    return found


def _mark(model: Any, chosen: Callable[[tuple[str, ...], Any], bool]) -> PyTree:
    marks = [
        eqx.is_inexact_array(leaf) and chosen(path, owner)
        for path, owner, leaf in _leaves(model)
    ]
    return jax.tree.unflatten(jax.tree.structure(model), marks)
