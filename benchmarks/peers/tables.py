r"""Make tables and figures of docs/benchmarks.md of what `run.py` measured.

    python benchmarks/peers/tables.py runs/peers.json --figures docs/images \
        --write docs/benchmarks.md

Prints the tables; with --write puts them into pages between their markers,
``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import figures
import numpy as np
import records
from records import MODELS, NAMES, PUBLIC


def main() -> None:
    """Print the tables, write them into a page, draw the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE")
    parser.add_argument("--figures", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    tables = make(record)
    for page in options.write or []:
        page.write_text(filled(page.read_text(), tables))
    if not options.write:
        for name, table in tables.items():
            print(f"\n{name}\n\n{table}")
    if options.figures:
        figures.draw(record, options.figures)


def make(record: dict[str, Any]) -> dict[str, str]:
    """Return the tables in Markdown, by name."""
    works = sorted(record["works"], key=lambda work: work["physical_batch"])
    record = record | {"works": works}
    tables = {
        "machine": _machine(record),
        "goals": _goals(record),
        "summary": _summary(record["works"]),
        "failed": _errors(record["works"]),
    }
    for model in dict.fromkeys(work["model"] for work in record["works"]):
        works = [work for work in record["works"] if work["model"] == model]
        tables[model] = _throughput(works)
        tables[f"{model} memory"] = _memory(works)
    tables["agreement"] = _agreement(record["works"])
    for found in record["poisson"]:
        tables[f"poisson {found['work']}"] = _poisson(found)
    if "training" in record:
        tables["training"] = _training(record["training"])
    for found in record["largest"]:
        tables[f"largest {found['model']}"] = _largest(found)
    return tables


def filled(page: str, tables: dict[str, str]) -> str:
    """Return the page with each table between its markers.

    Raises:
        LookupError: the page asks for a table that was not measured.
    """

    def table(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise LookupError(f"nothing was measured for {match[1]!r}")
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]}\n<!-- end -->"

    pattern = r"<!-- table: (.+?) -->\n.*?<!-- end -->"
    return re.sub(pattern, table, page, flags=re.S)


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = dict(record["versions"])
    for work in record["works"]:
        for row in work["rows"]:
            versions |= row.get("versions", {})
    dates = sorted({work["date"][:10] for work in record["works"]})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    listed = ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))
    device = "" if machine["backend"] == "cpu" else f", {machine['device']}"
    return (
        f"{machine['cpu'] or 'processor unknown'}, {machine['cores']} cores{device}; "
        f"{when}; {listed}."
    )


def _throughput(works: list[dict[str, Any]]) -> str:
    batches = [work["physical_batch"] for work in works]
    rows = []
    for system in records.systems(works):
        cells = []
        for work in works:
            found = [row for row in work["rows"] if row["system"] == system]
            row = found[0] if found else None
            if row is None:
                cells.append("")
            elif records.failed(row):
                cells.append("failed")
            else:
                rate = work["physical_batch"] / float(np.median(row["seconds"]))
                own = _own_sgd(work, system)
                ratio = "" if own in (None, rate) else f" ({own / rate:.2f})"
                cells.append(records.number(rate) + ratio)
        rows.append([NAMES[system], *cells])
    return _table(
        ["examples/s (time ÷ SGD's)", *(f"batch {batch}" for batch in batches)], rows
    )


def _own_sgd(work: dict[str, Any], system: str) -> float | None:
    """Return the rate of plain SGD that a system is held against: its framework's.

    Of JAX, with the options of the system, if that was measured.
    """
    if records.is_torch(system):
        return records.rate(work, "torch-sgd")
    if system.startswith("tanager") or system.endswith(":options"):
        return records.rate(work, "jax-sgd:options") or records.rate(work, "jax-sgd")
    return records.rate(work, "jax-sgd")


def _summary(works: list[dict[str, Any]]) -> str:
    columns = records.columns(works)
    heading = ["examples/s"]
    for work in columns:
        model = MODELS[work["model"]].split(",")[0]
        heading.append(f"{model}, batch {work['physical_batch']}")
    rows = [
        [
            NAMES[system],
            *(records.number(records.rate(work, system)) for work in columns),
        ]
        for system in records.systems(columns)
    ]
    return _table(heading, rows)


def _memory(works: list[dict[str, Any]]) -> str:
    """Return memory at the usual batch, and the seconds of the first step."""
    (usual,) = records.columns(works)
    batch, several = usual["physical_batch"], len(works) > 1
    rows = []
    for system in records.systems(works):
        found = {
            work["physical_batch"]: row
            for work in works
            for row in work["rows"]
            if row["system"] == system and not records.failed(row)
        }
        if batch not in found:
            continue
        row = found[batch]
        line = [NAMES[system], _mebibytes(row.get("step_bytes"))]
        if several:
            line.append(_fitting(found))
        line.append(_mebibytes(row.get("peak_bytes")))
        rows.append([*line, records.number(row.get("first_step_seconds"))])
    fitting = ["largest batch in 2 GiB"] if several else []
    heading = [f"at batch {batch}", "MiB of a step", *fitting]
    heading += ["MiB in all", "first step, s"]
    return _table(heading, rows)


def _mebibytes(count: int | None) -> str:
    return records.number(None if count is None else count / 2**20)


def _fitting(found: dict[int, dict[str, Any]]) -> str:
    """Return the batch whose step 2 GiB would hold, by a straight line through all."""
    peaks = {batch: row["step_bytes"] for batch, row in found.items()}
    if len(peaks) < 2:
        return "–"
    slope, base = np.polyfit(list(peaks), list(peaks.values()), 1)
    return records.number((2**31 - base) / slope) if slope > 0 else "any"


def _errors(works: list[dict[str, Any]]) -> str:
    rows = [
        [f"{work['model']}, {NAMES[row['system']]}", str(row["error"])]
        for work in works
        for row in work["rows"]
        if row.get("error")
    ]
    return _table(["failed", "with"], rows) if rows else "None failed."


def _agreement(works: list[dict[str, Any]]) -> str:
    models = [
        model
        for model in MODELS
        if any("sum_difference" in row for row in _rows(works, model))
    ]
    rows = []
    for system in records.systems(works):
        if system.startswith(PUBLIC) or system == "jax-vmap":
            continue
        cells = []
        for model in models:
            found = [
                row["sum_difference"]
                for work in works
                if work["model"] == model and _by_vmap(work)
                for row in work["rows"]
                if row["system"] == system and "sum_difference" in row
            ]
            cells.append(f"{max(found):.0e}" if found else "–")
        if set(cells) != {"–"}:
            rows.append([NAMES[system], *cells])
    return _table(["", *(MODELS[model].split(",")[0] for model in models)], rows)


def _rows(works: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    return [row for work in works if work["model"] == model for row in work["rows"]]


def _by_vmap(work: dict[str, Any]) -> bool:
    # Before other references were possible, vmap was the only one.
    by = work.get("held_against", {}).get("sums", "jax-vmap")
    return by is not None and by.startswith("jax-vmap")


def _poisson(found: dict[str, Any]) -> str:
    examples = sum(found["sizes"])
    rows = []
    for row in sorted(found["rows"], key=lambda row: list(NAMES).index(row["system"])):
        if records.failed(row):
            rows.append([NAMES[row["system"]], "failed", "", "", ""])
            continue
        seconds = np.array(row["seconds"])
        settled = np.median(seconds / np.array(found["sizes"]))
        rows.append(
            [
                NAMES[row["system"]],
                records.number(examples / seconds.sum()),
                records.number(1 / settled),
                str(row["compilations"]),
                str(row["recompilations"]),
            ]
        )
    heading = ["", "examples/s, all steps", "examples/s, median step"]
    heading += ["programs compiled in step 1", "compiled later"]
    return _table(heading, rows)


def _training(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        if row.get("error"):
            rows.append([NAMES[row["system"]], "failed", "", ""])
            continue
        difference = row.get("parameter_difference")
        rows.append(
            [
                NAMES[row["system"]],
                f"{100 * row['accuracy_without_noise']:.1f} %",
                "–" if not difference else f"{difference:.0e}",
                f"{100 * row['accuracy']:.1f} %",
            ]
        )
    heading = ["", "accuracy, no noise", "parameters off by", "accuracy, with noise"]
    return _table(heading, rows)


def _largest(found: dict[str, Any]) -> str:
    rows = [
        [NAMES[row["system"]], str(row.get("physical_batch", "failed"))]
        for row in found["rows"]
    ]
    return _table(["", "largest physical batch"], rows)


def _goals(record: dict[str, Any]) -> str:
    """Return the goals: each side at the batch that is its best."""
    rows = []
    for model in ("wrn-16-4-plain", "wrn-16-4", "vit-tiny-16"):
        works = [work for work in record["works"] if work["model"] == model]
        if not works:
            continue
        ours = _best(works, lambda name: name.startswith("tanager"))
        peers = _best(
            works,
            lambda name: name.startswith(
                ("opacus", "jax-privacy", "private-vision", "fastdp")
            ),
        )
        wanted: list[tuple[str, Any, float]] = []
        if model == "vit-tiny-16":
            opacus = _best(works, lambda name: name.startswith("opacus"))
            wanted.append(("fastest Opacus", opacus, 1.5))
        else:
            jax_privacy = _best(works, lambda name: name.startswith("jax-privacy"))
            own = _best(works, lambda name: name.startswith("jax-sgd"))
            torch = _best(works, lambda name: name.startswith("torch-sgd"))
            wanted += [
                ("fastest private peer", peers, 1.8),
                ("JAX-Privacy", jax_privacy, 4.0),
                ("JAX SGD", own, 1 / 1.1),
                ("PyTorch SGD", torch, 0.6),
            ]
        name = MODELS[model].split(",")[0]
        for than, other, goal in wanted:
            if ours is None or other is None:
                continue
            reached = ours[0] / other[0]
            rows.append(
                [
                    name,
                    than,
                    f"{records.number(ours[0])} / {records.number(other[0])}",
                    f"{reached:.2f}",
                    f"≥\u00a0{goal:.2f}",
                    "met" if reached >= goal else "**missed**",
                ]
            )
            name = ""
    heading = ["model", "tanager ÷", "examples/s", "ratio", "goal", ""]
    return _table(heading, rows)


def _best(works: list[dict[str, Any]], wanted: Any) -> tuple[float, str] | None:
    rates = [
        (rate, row["system"])
        for work in works
        for row in work["rows"]
        if wanted(row["system"])
        and (rate := records.rate(work, row["system"])) is not None
    ]
    return max(rates) if rates else None


if __name__ == "__main__":
    main()
