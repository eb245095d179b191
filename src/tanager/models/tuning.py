"""What to train of a pretrained model: everything, the head, or few parameters.

Few trained parameters meet little noise: the noise on a gradient grows with the root of
their number. Every choice trains the head, which is new.

| name | trained besides the head |
|---|---|
| `all` | everything |
| `last-layer` | nothing |
| `biases-and-norms` | every bias, and the scales and gains of norms and convolutions |
| `film` | a scale and a shift of each channel: norms', or gains where there are none |
| `lora` | two thin matrices beside each linear layer of attention and MLP |

`biases-and-norms` is BitFit (Ben Zaken et al. 2022, arXiv:2106.10199; privately: Bu et
al. 2022, arXiv:2210.00036) with the norms. `film` is Perez et al. 2018
(arXiv:1709.07871) as Tobaben et al. 2023 (arXiv:2302.01190) fine-tune privately: a
model that normalises trains the norms' own scale and shift. `lora` is Hu et al. 2021
(arXiv:2106.09685), privately as Yu et al. 2022 (arXiv:2110.06500).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from tanager import _validate as validate
from tanager.models import layers


FINE_TUNING = ("all", "last-layer", "biases-and-norms", "film", "lora")

_NORM_LEAVES = ("scale", "gain")
Model = TypeVar("Model", bound=eqx.Module)


class LowRankLinear(eqx.Module):
    """A linear layer with a trained product of two thin matrices beside its weight.

    Shapes: ``[features_in] -> [features_out]``: y = xW + b + (α/r)·(xA)B.

    Attributes:
        linear: W and b, as they were.
        down: A, float32 ``[features_in, rank]``, Gaussian of variance 1/features_in.
        up: B, float32 ``[rank, features_out]``, 0 at first, so that nothing changes.
        scale: α/r.

    References:
        Hu et al. 2021, "LoRA", arXiv:2106.09685, section 4.1.
    """

    linear: layers.Linear
    down: Float[Array, "i r"]
    up: Float[Array, "r o"]
    scale: float = eqx.field(static=True)

    def __init__(
        self, linear: layers.Linear, rank: int, alpha: float, *, key: PRNGKeyArray
    ):
        features_in, features_out = linear.weight.shape
        self.linear = linear
        deviation = features_in**-0.5
        self.down = deviation * jax.random.normal(key, (features_in, rank))
        self.up = jnp.zeros((rank, features_out), jnp.float32)
        self.scale = alpha / rank

    def __call__(self, features: Float[Array, " i"]) -> Float[Array, " o"]:
        """Map one vector."""
        inner = (features @ self.down.astype(features.dtype)) * self.scale
        return self.linear(features) + inner @ self.up.astype(features.dtype)

    def merged(self) -> layers.Linear:
        """Return the one linear layer that does the same."""
        weight = self.linear.weight
        added = (self.down @ self.up) * self.scale
        return eqx.tree_at(
            lambda layer: layer.weight, self.linear, weight + added.astype(weight.dtype)
        )


def fine_tune(
    model: Model, what: str, *, key: PRNGKeyArray, rank: int = 8, alpha: float = 16.0
) -> tuple[Model, PyTree]:
    """Return a model ready to be fine-tuned, and which of its leaves are to be trained.

    Args:
        model: with a linear layer called ``head``.
        what: one of `FINE_TUNING`.
        key: of the low-rank matrices; nothing else is drawn.
        rank: r of ``"lora"``, at least 1.
        alpha: α of ``"lora"``: the product counts α/r times.

    Returns:
        The model (with `LowRankLinear` in place of linear layers under ``"lora"``), and
        a pytree of booleans like it, for `tanager.train`.

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
        model = _with_low_rank(model, rank, alpha, key)
    chosen = {
        "all": lambda path, owner: True,
        "last-layer": lambda path, owner: False,
        "biases-and-norms": _bias_or_norm,
        "film": _film(model),
        "lora": lambda path, owner: (
            isinstance(owner, LowRankLinear) and path[-1] in ("down", "up")
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


def merge(model: Model) -> Model:
    """Return the model with every `LowRankLinear` made one linear layer again."""

    def one(part: Any) -> Any:
        return part.merged() if isinstance(part, LowRankLinear) else part

    return jax.tree.map(one, model, is_leaf=lambda x: isinstance(x, LowRankLinear))


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


def _with_low_rank(model: Any, rank: int, alpha: float, key: PRNGKeyArray) -> Any:
    """Replace the linear layers of all blocks of a transformer."""
    if not hasattr(model, "blocks") or not _linears(model.blocks):
        validate.refuse(
            "fine_tune",
            "lora",
            f"needs linear layers in blocks, and {type(model).__name__} has none",
            "it is for transformers: use film or biases-and-norms",
        )
    keys = iter(jax.random.split(key, len(_linears(model.blocks))))

    def one(part: Any) -> Any:
        if not isinstance(part, layers.Linear):
            return part
        return LowRankLinear(part, rank, alpha, key=next(keys))

    blocks = jax.tree.map(one, model.blocks, is_leaf=_is_linear)
    return eqx.tree_at(lambda tree: tree.blocks, model, blocks)


def _is_linear(part: Any) -> bool:
    return isinstance(part, layers.Linear)


def _linears(tree: Any) -> list[layers.Linear]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_linear) if _is_linear(x)]
