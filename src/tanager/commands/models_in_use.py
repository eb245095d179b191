"""What `tanager predict` and `tanager evaluate` share: the model, and a bar."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate
from tanager._reading import reason


if TYPE_CHECKING:
    from tanager.use.model import Model


def load(source: str, weights: str, code: str | None) -> "Model":
    """Load a model; `code` names a function that returns (params, predict)."""
    from tanager.use.model import load

    return load(source, weights=weights, code=None if code is None else _named(code))


def _named(code: str) -> Any:
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
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[1])):
        rule = f"returns {type(found).__name__}, and must return (params, predict)"
        validate.refuse("code", code, rule)
    return found


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, if it is a terminal; call it with (done, all)."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from tanager.recipes.tasks import progress_bar

    with progress_bar("predicting", True) as report:
        yield report
