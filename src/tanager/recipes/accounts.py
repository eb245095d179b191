"""Which account the runs of a recipe are charged to."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tanager import _validate as validate
from tanager._cache import state_folder
from tanager.privacy.account import Account
from tanager.recipes.recipe import Recipe


if TYPE_CHECKING:
    from tanager.data import Dataset


NONE = "none"
"""What a recipe names in place of an account, to do without one."""


def account_of(recipe: Recipe, dataset: "Dataset", what: str = "run") -> Account | None:
    """Return the account of a recipe's data; None if it does without.

    `what` is charged, see `tanager.privacy.charges.WHAT`.
    """
    path = path_of(recipe)
    if path is None:
        return None
    data = None if dataset.origin is None else dataset.origin().hex()
    return Account(path, data, what, "person" if recipe.unit == "group" else "example")


def path_of(recipe: Recipe) -> Path | None:
    """Return the file of the account of a recipe; None if it does without."""
    if recipe.account == NONE:
        return None
    data = recipe.data or recipe.features_from
    return Path(recipe.account or default_path(recipe.dataset, data))


def default_path(dataset: str, data: str | None) -> Path:
    """Return the file of the account of some data, which may not be there yet.

    It is beside the data, ``DATA.account.jsonl``; or in the folder of this user's
    state, if the data's folder cannot be written to, or tanager brings the data.

    Raises:
        ValueError: both files exist, so that each misses the other's charges.
    """
    accounts = state_folder() / "accounts"
    if data is None:
        return accounts / f"{dataset}.account.jsonl"
    place = Path(data).expanduser().resolve()
    if place.name == "train_features.npy":  # It stands for its folder.
        place = place.parent
    beside = Path(f"{place}.account.jsonl")
    digest = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    elsewhere = accounts / f"{place.name}-{digest}.account.jsonl"
    both = [path for path in (beside, elsewhere) if path.exists()]
    if len(both) == 2:
        rule = f"has two accounts: {beside} and {elsewhere}"
        remedy = "name the one to charge with --account; it misses the other's charges"
        validate.refuse("data", data, rule, remedy)
    if both:
        return both[0]
    return beside if os.access(beside.parent, os.W_OK) else elsewhere
