"""Which account the runs of a recipe are charged to."""

import contextlib
import hashlib
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tanager import _validate as validate
from tanager._cache import expanded, state_folder
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
        ValueError: both files exist, so that each misses the other's charges; or none,
            and a folder around the data, or something in their folder, has one.
    """
    accounts = state_folder() / "accounts"
    if data is None:
        return accounts / f"{dataset}{_ENDING}"
    place = expanded(data).resolve()
    if place.name == "train_features.npy":  # It stands for its folder.
        place = place.parent
    beside, elsewhere = _paths(place)
    both = [path for path in (beside, elsewhere) if path.exists()]
    if len(both) == 2:
        rule = f"has two accounts: {beside} and {elsewhere}"
        remedy = "name the one to charge with --account; it misses the other's charges"
        validate.refuse("data", data, rule, remedy)
    if both:
        return both[0]
    around = (path for parent in place.parents for path in _paths(parent))
    for other in (*around, *sorted(place.glob(f"*{_ENDING}"))):
        if other.exists():
            rule = f"has no account yet, and {other} is of data around it, or in it"
            file = shlex.quote(str(other))
            remedy = f"`tanager account accept --account {file}` and --account {file}; "
            remedy += "or, if no image is in both, another --account"
            validate.refuse("data", data, rule, remedy)
    return beside if os.access(beside.parent, os.W_OK) else elsewhere


def _paths(place: Path) -> tuple[Path, Path]:
    """Return where the account of data at a place may be."""
    digest = hashlib.blake2b(os.fsencode(place), digest_size=8).hexdigest()
    name = f"{place.name}-{digest}{_ENDING}"
    return Path(f"{place}{_ENDING}"), state_folder() / "accounts" / name
