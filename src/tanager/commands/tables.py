"""Tables and sentences that commands share."""

import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table

from tanager._files import as_json
from tanager._terminal import new_console


def print_json(content: Any, indent: int | None = 2) -> int:
    """Print a JSON object, with null for what is not finite; return exit status 0."""
    # JSON has \u00fc; the \xfc that such a stream would write is not valid in it.
    encoding = getattr(sys.stdout, "encoding", None) or "utf"
    letters = encoding.lower().startswith("utf")
    print(json.dumps(as_json(content), indent=indent, ensure_ascii=not letters))
    return 0


def error_lines(rows: list[dict[str, Any]], of: str = "{strategy}") -> list[str]:
    """Return a line for each row that has an error, beginning with what it is `of`."""
    return [f"{of.format(**row)}: {row['error']}" for row in rows if row["error"]]


def new_table(
    *headings: str, texts: Collection[str] = (), rows: Iterable[Sequence[str]] = ()
) -> Table:
    """Return a table without lines.

    Args:
        headings: of the columns; all but the first and `texts` are numbers.
        texts: headings of columns of text.
        rows: the cells.
    """
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        right = number and heading not in texts
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_table(table: Table) -> None:
    """Print a table whole: a narrow terminal breaks its lines, and cuts no number."""
    new_console(width=1000, markup=False).print(table)


def milliseconds(row: dict[str, Any]) -> str:
    """Return median and interquartile range; of one timing there is none."""
    spread = row["seconds_spread"]
    shown = "—" if spread is None else digits(1e3 * spread, 2)
    return f"{digits(1e3 * row['seconds'])} ± {shown}"


def digits(value: float, count: int = 4) -> str:
    """Return a number to `count` digits, or to 1 where that is more; no exponent."""
    return f"{value:,.0f}" if value >= 10 ** (count - 1) else f"{value:.{count}g}"


def number(value: float | None, form: str) -> str:
    """Return a number as `form` says, or a dash in place of None."""
    return "—" if value is None else form.format(value)
