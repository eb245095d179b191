"""What a study searches: the same for all its workers, from its first day."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tanager import __version__
from tanager import _validate as validate
from tanager._files import as_json, make_folder, write_json
from tanager._reading import reading
from tanager._record import Each, Maybe, read_record
from tanager.data import Dataset
from tanager.recipes import tasks
from tanager.recipes.optimizers import optimizer
from tanager.recipes.recipe import Recipe
from tanager.search import jobs
from tanager.search.simulation import TOO_SMALL, Target, plan_simulation
from tanager.search.space import BUDGET, Space
from tanager.training.run_folder import refuse_foreign


SAMPLERS = ("tpe", "random", "grid")
PRUNERS = ("median", "halving", "none")
_ANOTHER = "start another study"
_STUDY = {
    "tanager": str,
    "recipe": Each(object),
    "examples": int,
    "space": Each(object),
    "batch_sizes": [int],
    "validation_examples": int,
    "repeats": int,
    "sampler": str,
    "pruner": str,
    "seed": Maybe(int),
}
_PLAIN = ("batch_sizes", "validation_examples", "repeats", "sampler", "pruner", "seed")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a study searches.

    Attributes:
        target: the run that the search is for.
        space: what varies.
        batch_sizes: of the simulations, in rising order. Trials run at the first, the
            best choices at all of them.
        validation_examples: training examples held out of the simulations, to compare
            them. Test examples are not read.
        repeats: runs of the best choices at each batch size.
        sampler: one of `SAMPLERS`.
        pruner: one of `PRUNERS`: "median" ends a trial that at an evaluation is below
            the median of those before it, once there are five of them and a third of
            the steps are done. "halving" continues the best quarter at a sixteenth and
            at a quarter of the steps (asynchronous successive halving, Li et al. 2020,
            Algorithm 1, without resuming). Trials of different lengths are not ended.
        seed: of the sampler; None for a random one.

    Raises:
        ValueError: a field is out of range, or a choice makes no recipe.
    """

    target: Target
    space: Space
    batch_sizes: tuple[int, ...]
    validation_examples: int
    repeats: int = 2
    sampler: str = "tpe"
    pruner: str = "median"
    seed: int | None = None

    def __post_init__(self):
        validate.one_of(SAMPLERS, sampler=self.sampler)
        validate.one_of(PRUNERS, pruner=self.pruner)
        validate.whole(
            repeats=self.repeats,
            validation_examples=self.validation_examples,
            at_least=1,
        )
        sizes, largest = self.batch_sizes, self.target.recipe.batch_size
        for size in sizes:
            validate.whole(simulation_batch_sizes=size, at_least=1, remedy=TOO_SMALL)
        rule = ""
        if not sizes:
            rule = "must have at least one"
        elif list(sizes) != sorted(set(sizes)):
            rule = "must be in rising order"
        elif sizes[-1] > largest:
            rule = f"must be at most the target's batch size, {largest}"
        if rule:
            validate.refuse("simulation_batch_sizes", sizes, rule)
        if self.sampler == "grid":
            self.space.points(self.target.recipe)  # refuses a range
        for batch_size in self.batch_sizes:
            self.target.simulated(batch_size)

    def simulated(
        self, batch_size: int, values: Mapping[str, Any] | None = None
    ) -> Recipe:
        """Return the recipe of a simulation, with some choices.

        Where the target's batch size is chosen, that of the simulation changes by the
        same factor.
        """
        target = self.target.varied(self.space, values or {})
        factor = target.recipe.batch_size / self.target.recipe.batch_size
        held_out = self.validation_examples
        return target.simulated(
            round(batch_size * factor), validation_examples=held_out
        )

    def check(self, dataset: Dataset) -> None:
        """Refuse choices that make no run; see `check_choices`."""
        budget = [name for name in BUDGET if name in self.space.values]
        for values in itertools.product(*map(self.space.ends, budget)):
            chosen = dict(zip(budget, values, strict=True))
            self.simulated(self.batch_sizes[0], chosen)
        start = self.target.simulated(self.batch_sizes[0])
        check_choices(self.space, start, self.target.steps, dataset)

    def to_json(self) -> dict[str, Any]:
        """Return what identifies the study, but not where its folder is."""
        recipe = {"name": self.target.name, **self.target.recipe.to_json()}
        return {
            "tanager": __version__,
            "recipe": recipe | {"out": None},
            "examples": self.target.examples,
            "epsilon": self.target.epsilon,
            "space": self.space.to_json(),
            **{name: getattr(self, name) for name in _PLAIN},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the settings that `to_json` wrote."""
        recipe = dict(content["recipe"])
        name = recipe.pop("name")
        recipe = Recipe.from_json(recipe)
        target = plan_simulation(name, recipe, content["examples"])
        return cls(
            target,
            Space.from_json(content["space"]),
            tuple(content["batch_sizes"]),
            **{name: content[name] for name in _PLAIN[1:]},
        )


def check_choices(space: Space, start: Recipe, steps: int, dataset: Dataset) -> None:
    """Refuse choices that make no run, before anything is run.

    Each value is tried alone in the recipe; of a range, its two ends.
    """
    tasks.warn_of_preprocessing(start)
    for name in space.values:
        for value in space.ends(name):
            recipe = space.recipe(start, {name: value})
            tasks.check_augmentation(recipe, dataset)
            optimizer(recipe, steps)
            jobs.flops_of(recipe, dataset)


def require_same(
    folder: Path, before: Mapping[str, Any], content: Mapping[str, Any]
) -> None:
    """Refuse other settings than those a folder was begun with."""
    now = as_json(content)
    for old, new in ((before["recipe"], now["recipe"]), (before, now)):
        for name in old:
            if old[name] != new.get(name):
                raise ValueError(
                    f"search {folder} cannot be resumed: {name} was "
                    f"{old[name]!r:.80} and is {new.get(name)!r:.80}: search with "
                    "the same settings, or into another folder (--out)"
                )


def agreed(folder: Path, settings: Settings | None) -> Settings:
    """Return the settings in the folder, which must be those asked for."""
    path = folder / "study.json"
    if not path.exists():
        if settings is None:
            remedy = "give the folder of a study"
            validate.refuse("study", str(folder), "has no study.json", remedy)
        refuse_foreign(folder, (), "study")
        make_folder(folder, "out", 0o700)
        write_json(path, settings.to_json())
        return settings
    content = read_record(path, _STUDY, _ANOTHER)
    if content["tanager"] != __version__:
        rule = f"was started by tanager {content['tanager']}, and this is {__version__}"
        remedy = f"resume it with that version, or {_ANOTHER}"
        validate.refuse("study", str(folder), rule, remedy)
    if settings is not None:
        require_same(folder, content, settings.to_json())
    with reading(path, "does not hold the settings of a search", _ANOTHER):
        return Settings.from_json(content)
