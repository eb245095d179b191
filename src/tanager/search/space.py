"""What a search may vary: fields of the recipe by name, each with its values.

Grids are those of TAN Without a Burn, section 4.2 and Figure 5, where it searches a
name. The decay 0.999 is the best of its Table 2, though not in its list.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution


Value = float | int | str


class Choices(NamedTuple):
    """One of several values."""

    values: tuple[Value, ...]

    def distribution(self) -> "BaseDistribution":
        """Return Optuna's form of it."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def draw(self, random: np.random.Generator) -> Value:
        """Draw a value, each with the same probability."""
        return self.values[int(random.integers(len(self.values)))]

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))


class Between(NamedTuple):
    """A number between two others, drawn uniformly in its logarithm."""

    low: float
    high: float

    def distribution(self) -> "BaseDistribution":
        """Return Optuna's form of it."""
        from optuna.distributions import FloatDistribution

        return FloatDistribution(self.low, self.high, log=True)

    def draw(self, random: np.random.Generator) -> Value:
        """Draw a value uniformly in its logarithm."""
        return math.exp(random.uniform(math.log(self.low), math.log(self.high)))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


Values = Choices | Between


class _Field(NamedTuple):
    """How a name that can be varied changes a recipe.

    Attributes:
        parse: from text to a value.
        grid: values of a name that is given alone.
        field: the field of the recipe; the name itself by default.
        option: whether it is an option of the optimizer.
        optimizer: whether it applies to "sgd" or to the "others"; None for any.
    """

    parse: Callable[[str], Value]
    grid: tuple[Value, ...]
    field: str | None = None
    option: bool = False
    optimizer: str | None = None


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


FIELDS: dict[str, _Field] = {
    "epsilon": _Field(float, ()),
    "batch_size": _Field(int, ()),
    "steps": _Field(int, ()),
    "noise_multiplier": _Field(float, ()),
    "model": _Field(str, ()),
    "normalisation_order": _Field(str, ("pre-activation", "post-activation")),
    "weight_standardisation": _Field(_switch, (False, True)),
    "fine_tune": _Field(str, ("last-layer", "film", "biases-and-norms", "all")),
    "optimizer": _Field(str, ("sgd", "adam", "adamw")),
    "learning_rate": _Field(float, (1.0, 2.0, 4.0, 8.0, 12.0, 16.0), optimizer="sgd"),
    "adam_learning_rate": _Field(
        float, (0.0003, 0.001, 0.003, 0.01), "learning_rate", optimizer="others"
    ),
    "momentum": _Field(float, (0.0, 0.1, 0.5, 0.9, 1.0), option=True, optimizer="sgd"),
    "dampening": _Field(float, (0.0, 0.1, 0.5, 0.9, 1.0), option=True, optimizer="sgd"),
    "ema_decay": _Field(float, (0.9, 0.99, 0.999, 0.9999, 0.99999)),
    "augmentation": _Field(str, ("rrc", "tan", "simclr")),
    "augmentation_multiplicity": _Field(int, (1, 2, 4, 8, 16)),
    "clip_norm": _Field(float, (0.1, 0.5, 1.0, 2.0)),
}
"""By name: what may be varied."""

BUDGET = ("epsilon", "batch_size", "steps", "noise_multiplier")
"""Those of `FIELDS` that share the budget: the others follow, see `Target.varied`."""


@dataclasses.dataclass(frozen=True)
class Space:
    """What is varied, and between which values.

    Attributes:
        values: by name of `FIELDS`.
    """

    values: Mapping[str, Values]

    def __post_init__(self):
        for name, values in self.values.items():
            validate.one_of(FIELDS, vary=name)
            if values == Choices(()):
                remedy = f"give some: {name.replace('_', '-')}=A,B,C"
                validate.refuse("vary", name, "has no values", remedy)

    @classmethod
    def default(cls, recipe: Recipe) -> "Space":
        """Return the paper's grids of the names that apply to a recipe.

        Momentum and dampening for SGD; augmentation if the recipe augments.
        """
        names = ["adam_learning_rate", "ema_decay"]
        if recipe.optimizer == "sgd":
            names = ["learning_rate", "ema_decay", "momentum", "dampening"]
        if recipe.augmentation_multiplicity:
            names += ["augmentation", "augmentation_multiplicity"]
        grids = {name: FIELDS[name].grid for name in names}
        if "augmentation" in grids:
            kinds = (recipe.augmentation, *grids["augmentation"])
            grids["augmentation"] = tuple(dict.fromkeys(kinds))
        return cls({name: Choices(grid) for name, grid in grids.items()})

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Space":
        """Read words such as ``learning-rate=1,2,4`` or ``learning-rate=0.5..8``.

        A name alone takes its grid. Underscores and hyphens are the same.

        Raises:
            ValueError: a word has another form, or a name is given twice.
        """
        values: dict[str, Values] = {}
        for word in words:
            name, _, text = word.partition("=")
            shown = name.strip().replace("_", "-")
            # With hyphens: else the command would list some of them as its flags.
            validate.one_of([each.replace("_", "-") for each in FIELDS], vary=shown)
            name = shown.replace("-", "_")
            if name in values:
                validate.refuse("vary", word, f"varies {shown} a second time")
            values[name] = _values(name, text, word)
        if "optimizer" in values and "adam_learning_rate" not in values:
            values["adam_learning_rate"] = Choices(FIELDS["adam_learning_rate"].grid)
        return cls(values)

    def recipe(self, start: Recipe, chosen: Mapping[str, Any]) -> Recipe:
        """Return a recipe with the chosen values.

        Raises:
            ValueError: they make no recipe.
        """
        recipe = start
        for name in _in_order(chosen):
            field, value = FIELDS[name], chosen[name]
            if not self._applies(name, recipe.optimizer):
                continue
            changes: dict[str, Any] = {field.field or name: value}
            if field.option:
                changes = {"optimizer_options": {**recipe.optimizer_options, **changes}}
            elif name == "optimizer" and value != recipe.optimizer:
                changes["optimizer_options"] = {}
            elif name == "model" and not _has_implementation(value, recipe):
                changes["implementation"] = None
            recipe = dataclasses.replace(recipe, **changes)
        return recipe

    def suggest(self, study: "Study", start: Recipe) -> dict[str, Any]:
        """Let a study of Optuna's choose a value for each name that applies."""
        names = _in_order(self.values)
        asked = study.ask({name: self.values[name].distribution() for name in names})
        return self._chosen(start, lambda name, _: asked.params[name])

    def draw(self, random: np.random.Generator, start: Recipe) -> dict[str, Any]:
        """Draw a value uniformly for each name that applies."""
        return self._chosen(start, lambda name, values: values.draw(random))

    def _chosen(
        self, start: Recipe, choose: Callable[[str, Values], Value]
    ) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name in _in_order(self.values):
            if self._applies(name, chosen.get("optimizer", start.optimizer)):
                chosen[name] = choose(name, self.values[name])
        return chosen

    def ends(self, name: str) -> tuple[Value, ...]:
        """Return all values of a name, of a range its two ends."""
        values = self.values[name]
        return tuple(values) if isinstance(values, Between) else values.values

    @property
    def varies_steps(self) -> bool:
        """Whether runs differ in length: T follows from σ, see `Target.varied`."""
        return not {"steps", "noise_multiplier"}.isdisjoint(self.values)

    @property
    def is_finite(self) -> bool:
        """Whether every name has values to choose from, and none a range."""
        return all(isinstance(values, Choices) for values in self.values.values())

    def points(self, start: Recipe) -> list[dict[str, Any]]:
        """Return every combination of values that apply to the same recipe.

        Raises:
            ValueError: a name has a range.
        """
        points: list[dict[str, Any]] = [{}]
        for name in _in_order(self.values):
            values, before, points = self.values[name], points, []
            if isinstance(values, Between):
                rule = "must be values, not a range"
                validate.refuse("vary", name, rule, "list them")
            for point in before:
                applies = self._applies(name, point.get("optimizer", start.optimizer))
                more = [{name: value} for value in values.values] if applies else [{}]
                points += [point | each for each in more]
        return points

    def _applies(self, name: str, optimizer: str) -> bool:
        if name == "learning_rate" and "adam_learning_rate" not in self.values:
            return True
        kind = "sgd" if optimizer == "sgd" else "others"
        return FIELDS[name].optimizer in (None, kind)

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
        """Return the space that `to_json` wrote."""
        return cls(
            {
                name: Between(*values["between"])
                if isinstance(values, dict)
                else Choices(tuple(values))
                for name, values in content.items()
            }
        )


def _has_implementation(model: Value, recipe: Recipe) -> bool:
    if recipe.implementation is None:
        return True
    from tanager.models import zoo

    return recipe.implementation in zoo.find(str(model)).implementations


def _in_order(names: Mapping[str, Any]) -> list[str]:
    """Return names in the order of `FIELDS`: an optimizer comes before its options."""
    return [name for name in FIELDS if name in names]


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
    except (ValueError, KeyError):
        shown = name.replace("_", "-")
        remedy = f"give {shown}=A,B,C, or {shown}=LOW..HIGH for a number, where LOW is "
        remedy += "above 0 and below HIGH"
        validate.refuse("vary", word, "cannot be read", remedy)
    return Choices(values)
