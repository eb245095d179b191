"""Pages and model cards from the templates beside this file.

Jinja2 escapes values in HTML, and `plain` in Markdown. Both lose control characters.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tanager import _validate as validate
from tanager._files import make_folder, write_text
from tanager._text import clean
from tanager.privacy.shown import format_bound, format_delta, format_epsilon
from tanager.report import guarantee


if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **fields: Any) -> str:
    """Fill a template of tanager's with untrusted values.

    Args:
        template: file name in ``templates/``; the ending, .html or .md, decides how
            values are escaped.
        fields: values by the names the template uses. `markupsafe.Markup` is not
            escaped.
    """
    return _environment().get_template(template).render(fields)


def require(folder: Path, argument: str, name: str, remedy: str) -> Path:
    """Return the path of a file, or refuse its folder because it has none."""
    if not (folder / name).exists():
        validate.refuse(argument, str(folder), f"has no {name}", remedy)
    return folder / name


def write_page(page: Path, template: str, **fields: Any) -> Path:
    """Write a page, whole or not at all, from a template; return its path.

    Raises:
        ValueError: its folder cannot be made.
    """
    make_folder(page.parent, "page's folder")
    write_text(page, render(template, **fields))
    return page


def plain(value: object) -> str:
    """Return a value on one line, with Markdown's special characters escaped."""
    one_line = " ".join(clean(value).split())
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", one_line)


def without_folders(value: Any) -> Any:
    """Return settings with the last part of each path in place of the path."""
    match value:
        case str() if not value.startswith(("hf:", "timm/")):
            return re.split(r"[/\\]", value.rstrip("/\\"))[-1] or value
        case Mapping():
            return {name: without_folders(each) for name, each in value.items()}
        case list():
            return [without_folders(each) for each in value]
        case _:
            return value


@functools.cache
def _environment() -> "Environment":
    # Imported here: `import tanager` and the command's help must stay quick.
    import jinja2
    from markupsafe import Markup

    @jinja2.pass_eval_context
    def finish(context: Any, value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return clean(value) if context.autoescape else plain(value)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html"], default=False),
        undefined=jinja2.StrictUndefined,
        finalize=finish,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "delta": format_delta,
        "duration": guarantee.duration,
        "epsilon": format_epsilon,
        "between": guarantee.between,
        "bound": format_bound,
        "day": guarantee.day,
        "number": guarantee.number,
        "percent": guarantee.percent,
        "short": lambda value: None if value is None else f"{value:.4g}",
        "simulated": guarantee.simulated,
        "text": guarantee.text,
    }
    return environment
