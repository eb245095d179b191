"""Start a run from a finished search, and add its result to the search."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate
from tanager import recipes
from tanager._files import write_json
from tanager._reading import read_json, reading
from tanager.recipes.recipe import Recipe, RecipeEntry
from tanager.report import search_page


if TYPE_CHECKING:
    from tanager.training.result import TrainResult


_NOT_PREDICTED_FOR = {
    *("account", "checkpoint_seconds", "data", "devices", "evaluate_every", "features"),
    *("features_from", "labels", "out", "physical_batch_size", "seed", "solve_for"),
    *("shard_parameters", "strategy", "stream", "unreadable", "workers"),
}
"""Fields of a recipe that do not change what a search predicts."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A study, what it found, and the recipe it is for, with the best choices."""

    folder: Path
    result: dict[str, Any]
    entry: RecipeEntry

    def of(self, recipe: Recipe) -> "Found":
        """Return it for this run: with no prediction, if that has other settings."""
        fields = (field.name for field in dataclasses.fields(Recipe))
        asked = {name: getattr(self.entry.recipe, name) for name in fields}
        if all(
            name in _NOT_PREDICTED_FOR or getattr(recipe, name) == value
            for name, value in asked.items()
        ):
            return self
        return dataclasses.replace(self, result=self.result | {"prediction": None})

    def links(self) -> dict[str, Any]:
        """Return what a run records about the search."""
        study = {
            "path": str(self.folder.resolve()),
            "trial": self.result["best"]["trial"],
            "prediction": self.result["prediction"],
        }
        return {"study": study}

    def tell(self, result: "TrainResult") -> None:
        """Add the result of a run that was predicted to the study and its report."""
        if result.evaluation_ema is None or self.result["prediction"] is None:
            return
        known = search_page.read_obtained(self.folder)
        mine = {
            "run": str(result.out),
            "batch_size": round(result.summary["batch_size"]),
            "accuracy": result.evaluation_ema.accuracy,
            "on": "test examples",
        }
        known = [each for each in known if each["run"] != mine["run"]] + [mine]
        write_json(self.folder / "obtained.json", known)
        search_page.write_report(self.folder)

    def sentence(self, result: "TrainResult") -> str:
        """Compare the predicted with the obtained accuracy in a sentence."""
        predicted = self.result["prediction"]
        if predicted is None or result.evaluation_ema is None:
            return f"the search in {self.folder} made no prediction for these settings"
        accuracy, low, high = (
            100 * predicted[name] for name in ("accuracy", "low", "high")
        )
        return (
            f"predicted {accuracy:.1f} % ({low:.1f} to {high:.1f} %) on held-out "
            f"examples, obtained {100 * result.evaluation_ema.accuracy:.1f} % on test "
            "examples"
        )


def named(words: Sequence[str]) -> Found | None:
    """Return the search that ``--from-study PATH`` names, or None."""
    for word, following in itertools.pairwise([*words, ""]):
        option, _, value = word.partition("=")
        if option == "--from-study" and (value or following):
            return _read(Path(value or following))
    return None


def _read(folder: Path) -> Found:
    path, remedy = folder / "result.json", "give the folder of a finished search"
    if not path.exists():
        validate.refuse("from_study", str(folder), "has no result.json", remedy)
    if "best" not in read_json(path):
        validate.refuse("from_study", str(folder), "is a run", remedy)
    result = search_page.read_result(folder)
    with reading(path, "has no recipe to train"):
        recipe = Recipe.from_json(result["best"]["recipe"])
        epsilon = result["target"]["epsilon"]  # kept at another batch size or N
        recipe = dataclasses.replace(recipe, epsilon=epsilon, out=f"{folder}-reference")
        entry = dataclasses.replace(
            recipes.get(result["recipe"]), recipe=recipe, published=(), pretrained_on=""
        )
    return Found(folder, result, entry)
