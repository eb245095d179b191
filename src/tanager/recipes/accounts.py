"""Which account the runs of a recipe are charged to."""

import contextlib
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
_ENDING = ".account.jsonl"


def account_of(recipe: Recipe, dataset: "Dataset", what: str = "run") -> Account | None:
    """Return the account of a recipe's data; None if it does without.

    `what` is charged, see `tanager.privacy.charges.WHAT`.

    Raises:
        ValueError: the data were renamed, and their account was not.
    """
    path = path_of(recipe)
    if path is None:
        return None
    data = None if dataset.origin is None else dataset.origin().hex()
    if data is not None and recipe.account is None and not path.exists():
        _require_new(path, data)
    return Account(path, data, what, "person" if recipe.unit == "group" else "example")


def path_of(recipe: Recipe) -> Path | None:
    """Return the file of the account of a recipe; None if it does without."""
    if recipe.account == NONE:
        return None
    data = recipe.data or recipe.features_from
    return Path(recipe.account or default_path(recipe.dataset, data))


def _require_new(path: Path, data: str) -> None:
    """Refuse to begin an account of data that were charged under an earlier name.

    Else what was spent before would be forgotten. Beside `path`, accounts whose data
    are gone are looked at.
    """
    for other in sorted(path.parent.glob(f"*{_ENDING}")):
        if other.with_name(other.name.removesuffix(_ENDING)).exists():
            continue
        known: set[str] = set()
        with contextlib.suppress(ValueError):  # It may be of another program.
            known = Account(other).read().data
        if data in known:
            rule = f"does not exist, and these data were charged to {other}"
            remedy = f"if they were renamed, rename that file to {path.name}; or name "
            remedy += "an account with --account"
            validate.refuse("account", str(path), rule, remedy)


def default_path(dataset: str, data: str | None) -> Path:
    """Return the file of the account of some data, which may not be there yet.

    It is beside the data, ``DATA.account.jsonl``; or in the folder of this user's
    state, if the data's folder cannot be written to, or tanager brings the data.

    Raises:
        ValueError: both files exist, so that each misses the other's charges.
    """
    accounts = state_folder() / "accounts"
    if data is None:
        return accounts / f"{dataset}{_ENDING}"
    place = Path(data).expanduser().resolve()
    if place.name == "train_features.npy":  # It stands for its folder.
        place = place.parent
    beside = Path(f"{place}{_ENDING}")
    digest = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    elsewhere = accounts / f"{place.name}-{digest}{_ENDING}"
    both = [path for path in (beside, elsewhere) if path.exists()]
    if len(both) == 2:
        rule = f"has two accounts: {beside} and {elsewhere}"
        remedy = "name the one to charge with --account; it misses the other's charges"
        validate.refuse("data", data, rule, remedy)
    if both:
        return both[0]
    return beside if os.access(beside.parent, os.W_OK) else elsewhere
