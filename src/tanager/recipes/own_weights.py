"""Weights that a run made: what a run that starts from them must say."""

import contextlib
import warnings
from typing import Any

from tanager._files import as_json
from tanager._reading import MALFORMED, read_json
from tanager._record import Maybe, check_record
from tanager.models.pretrained import find_weights
from tanager.models.tensors import note_in
from tanager.parallel import hosts
from tanager.privacy.account import Account
from tanager.privacy.shown import format_delta, format_epsilon


_NUMBERS = {"epsilon": Maybe(float), "delta": Maybe(float)}
_NOTE = {"charge": Maybe(str), "private": Maybe(bool), **_NUMBERS}
_OPEN = (
    "of a run that was not private, so no ε covers the images that it was trained on"
)
_SAME = (
    "of a run on the same data, so the model spent all that the account says, and not "
    "only the ε of its last run"
)


def remarks(weights: str | None, account: Account | None) -> list[str]:
    """Warn of weights that a run made; return what the model card says of them."""
    if weights is None:
        return []
    note = _note(weights)
    if account is not None and note.get("charge") in account.read().charges:
        text, remedy = _SAME, "start from weights of other data"
    elif note.get("private") is False:
        text, remedy = _OPEN, "start from weights of public images"
    elif account is None:
        return []
    elif note.get("private") and None not in (note["epsilon"], note["delta"]):
        text = f"of a run with ε = {format_epsilon(note['epsilon'])} at "
        text += f"δ = {format_delta(note['delta'])}, which adds to the ε of this one "
        text += "for all who are in the data of both"
        remedy = "if any are, charge it, too, with `tanager account add RUN`"
    else:
        return []
    if hosts.is_chief():
        rule = f"weights (={weights!r}) are {text}"
        warnings.warn(f"{rule}: {remedy}", stacklevel=3)
    return [text]


def _note(weights: str) -> dict[str, Any]:
    """Return what is noted in a file of weights, and beside it, of what it spent."""
    path, note = find_weights(weights), {}
    with contextlib.suppress(*MALFORMED):  # They may be of another program.
        beside = read_json(path.with_name("config.json"))
        note |= beside.get("tanager", {}).get("guarantee", beside)
    with contextlib.suppress(*MALFORMED):
        note |= as_json(note_in(path))  # an infinite ε is null
    with contextlib.suppress(*MALFORMED):
        check_record(path, note, _NOTE)
        return note
    return {}
