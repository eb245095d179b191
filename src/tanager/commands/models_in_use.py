"""What `tanager predict` and `tanager evaluate` share: the model, and a bar."""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate
from tanager._reading import reason


if TYPE_CHECKING:
    from tanager.use.model import Model


def load(source: str, weights: str, code: str | None) -> "Model":
    """Load a model; `code` names a function that returns what is in `_RETURNED`."""
    from tanager.use.model import load

    if code is None:
        return load(source, weights=weights)
    params, predict, preprocessing = _named(code)
    own = params, predict
    return load(source, weights=weights, code=own, preprocessing=preprocessing)


_RETURNED = "(params, predict) or (params, predict, preprocessing)"

FOR_IMAGES = "return (params, predict, preprocessing) from --code, for images"


def _named(code: str) -> tuple[Any, Any, Any]:
    from tanager.data.preprocessing import Preprocessing

    module, _, function = code.partition(":")
    remedy = "name MODULE:FUNCTION, such as mine:create for create() in mine.py"
    if not module or not function:
        validate.refuse("code", code, "is not MODULE:FUNCTION", remedy)
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)()
    except Exception as error:  # of a person's own code
        if os.environ.get("TANAGER_TRACEBACK"):
            raise
        validate.refuse("code", code, f"cannot be run ({reason(error)})", remedy)
    finally:
        sys.path.pop(0)
    fits = isinstance(found, tuple) and len(found) in (2, 3) and callable(found[1])
    params, predict, seen = (*found, None)[:3] if fits else (None, None, found)
    if not isinstance(seen, Preprocessing | None):
        rule = f"returns {type(found).__name__}, and must return {_RETURNED}"
        validate.refuse("code", code, rule, "see tanager.data.preprocessing")
    return params, predict, seen


@contextlib.contextmanager
def progress(
    shown: bool, title: str = "predicting"
) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, in a pipe a line now and then."""
    if not shown:
        yield lambda done, total: None
        return
    from tanager.recipes.tasks import progress_bar

    with progress_bar(title, True) as report:
        yield report


@contextlib.contextmanager
def reading(split: str) -> Iterator[Callable[[int, int], None]]:
    """Show `progress`. For split all, do not warn that some images are held out."""
    with warnings.catch_warnings(), progress(True, "reading images") as report:
        if split == "all":
            warnings.filterwarnings("ignore", "there are no test images")
        yield report
