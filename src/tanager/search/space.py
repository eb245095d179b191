"""What a search may vary: fields of the recipe by name, each with its values.

The grids are those of TAN Without a Burn, section 4.2.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import BaseTrial


Value = float | int | str


class Choices(NamedTuple):
    """One of these values."""

    values: tuple[Value, ...]

    def distribution(self) -> "BaseDistribution":
        """Return it as Optuna knows it."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def __str__(self) -> str:
        return ", ".join(str(value) for value in self.values)


class Between(NamedTuple):
    """A number between two others, drawn evenly in its logarithm."""

    low: float
    high: float

    def distribution(self) -> "BaseDistribution":
        """Return it as Optuna knows it."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=True)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


Values = Choices | Between


class _Field(NamedTuple):
    """How a name that can be varied changes a recipe.

    Attributes:
        grid: the paper's.
        parse: from text to a value.
        put: from a recipe and a value to the changed fields.
    """

    grid: tuple[Value, ...]
    parse: Callable[[str], Value]
    put: Callable[[Recipe, Any], dict[str, Any]]


def _plainly(name: str) -> Callable[[Recipe, Any], dict[str, Any]]:
    return lambda recipe, value: {name: value}


def _option(name: str) -> Callable[[Recipe, Any], dict[str, Any]]:
    return lambda recipe, value: {
        "optimizer_options": {**recipe.optimizer_options, name: value}
    }


def _with_optimizer(recipe: Recipe, value: str) -> dict[str, Any]:
    """Another optimizer takes no options of the one before."""
    kept = recipe.optimizer_options if value == recipe.optimizer else {}
    return {"optimizer": value, "optimizer_options": kept}


_OF_SGD = ("learning_rate", "momentum", "dampening")
_OF_OTHERS = ("adam_learning_rate",)

# In the order in which they are chosen and put into a recipe: an optimizer before its
# options.
FIELDS: dict[str, _Field] = {
    "model": _Field((), str, _plainly("model")),
    "normalisation_order": _Field(
        ("pre-activation", "post-activation"), str, _plainly("normalisation_order")
    ),
    "optimizer": _Field(("sgd", "adam", "adamw"), str, _with_optimizer),
    "learning_rate": _Field(
        (1.0, 2.0, 4.0, 8.0, 12.0, 16.0), float, _plainly("learning_rate")
    ),
    "adam_learning_rate": _Field(
        (0.0003, 0.001, 0.003, 0.01), float, _plainly("learning_rate")
    ),
    "momentum": _Field((0.0, 0.1, 0.5, 0.9), float, _option("momentum")),
    "dampening": _Field((0.0, 0.1, 0.5, 0.9), float, _option("dampening")),
    "ema_decay": _Field(
        (0.9, 0.99, 0.999, 0.9999, 0.99999), float, _plainly("ema_decay")
    ),
    "augmentation": _Field(("rrc", "tan", "simclr"), str, _plainly("augmentation")),
    "augmentation_multiplicity": _Field(
        (1, 2, 4, 8, 16), int, _plainly("augmentation_multiplicity")
    ),
    "clip_norm": _Field((0.1, 0.5, 1.0, 2.0), float, _plainly("clip_norm")),
}
"""By name: what may be varied."""


@dataclasses.dataclass(frozen=True)
class Space:
    """What is varied, and between which values.

    Attributes:
        values: by name of `FIELDS`.

    Raises:
        ValueError: a name is unknown, or has no values.
    """

    values: Mapping[str, Values]

    def __post_init__(self):
        for name, values in self.values.items():
            validate.one_of(FIELDS, vary=name)
            if isinstance(values, Choices) and not values.values:
                validate.refuse(
                    "vary", name, "has no values", f"give some: {name}=A,B,C"
                )

    @classmethod
    def default(cls, recipe: Recipe) -> "Space":
        """Return the paper's grids of what applies to a recipe.

        Momentum, dampening and decay for SGD; augmentation where the recipe augments.
        """
        names = ["learning_rate", "ema_decay"]
        if recipe.optimizer == "sgd":
            names += ["momentum", "dampening"]
        if recipe.augmentation_multiplicity:
            names += ["augmentation", "augmentation_multiplicity"]
        values = {name: Choices(FIELDS[name].grid) for name in names}
        if "augmentation" in values:
            kinds = dict.fromkeys((recipe.augmentation, *values["augmentation"].values))
            values["augmentation"] = Choices(tuple(kinds))
        return cls(values)

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Space":
        """Read ``learning-rate=1,2,4``, ``learning-rate=0.5..8`` or ``momentum``.

        A name alone has the paper's grid. Underscores do for hyphens.

        Raises:
            ValueError: a word is none of these.
        """
        values: dict[str, Values] = {}
        for word in words:
            name, _, text = word.partition("=")
            name = name.strip().replace("-", "_")
            validate.one_of(FIELDS, vary=name)
            if name in values:
                validate.refuse("vary", word, f"varies {name} a second time")
            values[name] = _values(name, text, word)
        if "optimizer" in values and "adam_learning_rate" not in values:
            values["adam_learning_rate"] = Choices(FIELDS["adam_learning_rate"].grid)
        return cls(values)

    def recipe(self, start: Recipe, chosen: Mapping[str, Any]) -> Recipe:
        """Return a recipe with the values that were chosen.

        Raises:
            ValueError: they make no recipe.
        """
        recipe = start
        for name, field in FIELDS.items():
            if name in chosen and _applies(name, recipe.optimizer):
                changes = field.put(recipe, chosen[name])
                recipe = dataclasses.replace(recipe, **changes)
        return recipe

    def suggest(self, trial: "BaseTrial", start: Recipe) -> dict[str, Any]:
        """Let a trial choose a value for each name that applies."""
        chosen: dict[str, Any] = {}
        for name in (name for name in FIELDS if name in self.values):
            if not _applies(name, chosen.get("optimizer", start.optimizer)):
                continue
            values = self.values[name]
            if isinstance(values, Between):
                chosen[name] = trial.suggest_float(name, *values, log=True)
            else:
                chosen[name] = trial.suggest_categorical(name, values.values)
        return chosen

    def draw(self, random: np.random.Generator) -> dict[str, Any]:
        """Draw a value for each name, evenly and without looking at anything."""
        chosen: dict[str, Any] = {}
        for name in (name for name in FIELDS if name in self.values):
            values = self.values[name]
            if isinstance(values, Between):
                low, high = math.log(values.low), math.log(values.high)
                chosen[name] = math.exp(random.uniform(low, high))
            else:
                chosen[name] = values.values[int(random.integers(len(values.values)))]
        return chosen

    @property
    def size(self) -> float:
        """How many settings there are, infinite with a range."""
        if any(isinstance(values, Between) for values in self.values.values()):
            return math.inf
        return math.prod(
            len(values.values)
            for values in self.values.values()
            if isinstance(values, Choices)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the space as plain values; `from_json` reads them."""
        return {
            name: {"between": list(values)}
            if isinstance(values, Between)
            else list(values.values)
            for name, values in self.values.items()
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Space":
        """Make a space of what `to_json` returned."""
        return cls(
            {
                name: Between(*values["between"])
                if isinstance(values, dict)
                else Choices(tuple(values))
                for name, values in content.items()
            }
        )


def _applies(name: str, optimizer: str) -> bool:
    return name not in (_OF_OTHERS if optimizer == "sgd" else _OF_SGD)


def _values(name: str, text: str, word: str) -> Values:
    field = FIELDS[name]
    if not text:
        return Choices(field.grid)
    try:
        if ".." in text:
            low, high = (float(end) for end in text.split(".."))
            if field.parse is not float or not 0 < low < high < math.inf:
                raise ValueError
            return Between(low, high)
        values = tuple(dict.fromkeys(field.parse(each) for each in text.split(",")))
    except ValueError:
        validate.refuse(
            "vary",
            word,
            "cannot be read",
            f"give {name}=A,B,C, or {name}=LOW..HIGH for a positive number",
        )
    return Choices(values)
