r"""Make tables and pictures of docs/benchmarks.md of what `conduct.py` measured.

    python benchmarks/peers/tables.py runs/peers.json --pictures docs/images \
        --write docs/benchmarks.md README.md

Prints the tables; with --write puts them into pages between their markers,
``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np


NAMES = {
    "torch-sgd": "PyTorch, SGD",
    "torch-sgd:nhwc": "PyTorch, SGD, channels last",
    "jax-sgd": "JAX, SGD",
    "jax-sgd:options": "JAX, SGD, tanager's options",
    "tanager:auto": "**tanager**",
    "tanager:auto:low": "**tanager**, low memory",
    "opacus:hooks": "Opacus",
    "opacus:hooks:nhwc": "Opacus, channels last",
    "opacus:ghost": "Opacus, ghost",
    "opacus:functorch": "Opacus, functorch",
    "jax-privacy": "JAX-Privacy",
    "jax-privacy:options": "JAX-Privacy, tanager's options",
    "jax-privacy:8": "JAX-Privacy, microbatches of 8",
    "jax-vmap": "JAX, vmap by hand",
    "jax-vmap:options": "JAX, vmap by hand, tanager's options",
    "private-vision:ghost": "private_vision, ghost",
    "private-vision:mixed": "private_vision, mixed",
    "fastdp:MixOpt": "FastDP, MixOpt",
}
MODELS = {
    "wrn-16-4": "WRN-16-4 with weight standardisation, 32 × 32",
    "wrn-16-4-plain": "WRN-16-4 without weight standardisation, 32 × 32",
    "vit-tiny-16": "ViT-Tiny/16, 224 × 224",
    "vit-base-16": "ViT-B/16, 224 × 224",
    "bit-50x1": "BiT-50x1, 224 × 224",
    "mlp": "MLP, two hidden layers of 1024, 3072 features",
    "linear": "linear head, 2048 features",
}
PUBLIC = ("torch-sgd", "jax-sgd")
_COLOURS = {
    "torch-sgd": "0.35",
    "jax-sgd": "0.6",
    "tanager": "#c0392b",
    "opacus": "#2c6fb0",
    "jax-privacy": "#2e8b57",
    "jax-vmap": "#8a6d3b",
    "private-vision": "#7b4fa3",
    "fastdp": "#b07aa1",
}


def main() -> None:
    """Print the tables, write them into a page, draw the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    tables = make(record)
    for page in options.write or []:
        page.write_text(filled(page.read_text(), tables))
    if not options.write:
        for name, table in tables.items():
            print(f"\n{name}\n\n{table}")
    if options.pictures:
        draw(record, options.pictures)


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


def median(row: dict[str, Any]) -> float | None:
    """Return the median seconds of a step; None for a system that failed."""
    return float(np.median(row["seconds"])) if not _failed(row) else None


def _failed(row: dict[str, Any]) -> bool:
    return bool(row.get("error")) or not row.get("seconds")


def _rate(work: dict[str, Any], system: str) -> float | None:
    for row in work["rows"]:
        if row["system"] == system and not _failed(row):
            return work["physical_batch"] / float(np.median(row["seconds"]))
    return None


def _systems(works: list[dict[str, Any]]) -> list[str]:
    present = {row["system"] for work in works for row in work["rows"]}
    return [name for name in NAMES if name in present]


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _machine(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = dict(record["versions"])
    for work in record["works"]:
        for row in work["rows"]:
            versions |= row.get("versions", {})
    told = ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))
    device = "" if machine["backend"] == "cpu" else f", {machine['device']}"
    return (
        f"{machine['cpu'] or 'processor unknown'}, {machine['cores']} cores{device}; "
        f"{record['date'][:10]}; {told}."
    )


def _throughput(works: list[dict[str, Any]]) -> str:
    batches = [work["physical_batch"] for work in works]
    rows = []
    for system in _systems(works):
        cells = []
        for work in works:
            found = [row for row in work["rows"] if row["system"] == system]
            row = found[0] if found else None
            if row is None:
                cells.append("")
            elif _failed(row):
                cells.append("failed")
            else:
                rate = work["physical_batch"] / float(np.median(row["seconds"]))
                own = _own_sgd(work, system)
                ratio = "" if own in (None, rate) else f" ({own / rate:.2f})"
                cells.append(_number(rate) + ratio)
        rows.append([NAMES[system], *cells])
    return _table(["examples/s", *(f"batch {batch}" for batch in batches)], rows)


def _own_sgd(work: dict[str, Any], system: str) -> float | None:
    """Return the rate of plain SGD that a system is held against: its framework's.

    Of JAX, with the options of the system, if that was measured.
    """
    if _is_torch(system):
        return _rate(work, "torch-sgd")
    if system.startswith("tanager") or system.endswith(":options"):
        return _rate(work, "jax-sgd:options") or _rate(work, "jax-sgd")
    return _rate(work, "jax-sgd")


def _columns(works: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one piece of work for each model, at the physical batch nearest to 32."""
    chosen = {}
    for work in sorted(works, key=lambda work: -abs(work["physical_batch"] - 32)):
        chosen[work["model"]] = work
    return [chosen[model] for model in MODELS if model in chosen]


def _summary(works: list[dict[str, Any]]) -> str:
    columns = _columns(works)
    heading = ["examples/s"]
    for work in columns:
        model = MODELS[work["model"]].split(",")[0]
        heading.append(f"{model}, batch {work['physical_batch']}")
    rows = [
        [NAMES[system], *(_number(_rate(work, system)) for work in columns)]
        for system in _systems(columns)
    ]
    return _table(heading, rows)


def _is_torch(system: str) -> bool:
    return system.split(":")[0] in ("torch-sgd", "opacus", "fastdp", "private-vision")


def _memory(works: list[dict[str, Any]]) -> str:
    """Return MiB of a step and in all by batch, and seconds of the first step."""
    batches = [work["physical_batch"] for work in works]
    (usual,) = _columns(works)
    rows = []
    for system in _systems(works):
        found = {
            work["physical_batch"]: row
            for work in works
            for row in work["rows"]
            if row["system"] == system and not _failed(row)
        }
        if not found:
            continue
        steps = [found.get(batch, {}).get("step_bytes") for batch in batches]
        line = [NAMES[system], *map(_mebibytes, steps)]
        if len(batches) > 1:
            line.append(_fitting(found))
        row = found.get(usual["physical_batch"], {})
        line.append(_mebibytes(row.get("peak_bytes")))
        rows.append([*line, _number(row.get("first_step_seconds"))])
    heading = ["", *(f"a step, batch {batch}" for batch in batches)]
    if len(batches) > 1:
        heading.append("batch in 2 GiB")
    heading.append(f"in all, batch {usual['physical_batch']}")
    return _table([*heading, "first step, s"], rows)


def _mebibytes(count: int | None) -> str:
    return _number(None if count is None else count / 2**20)


def _fitting(found: dict[int, dict[str, Any]]) -> str:
    """Return the batch whose step 2 GiB would hold, by a straight line through all."""
    peaks = {batch: row["step_bytes"] for batch, row in found.items()}
    if len(peaks) < 2:
        return "–"
    slope, base = np.polyfit(list(peaks), list(peaks.values()), 1)
    return _number((2**31 - base) / slope) if slope > 0 else "any"


def _errors(works: list[dict[str, Any]]) -> str:
    rows = [
        [f"{work['model']}, {NAMES[row['system']]}", str(row["error"])]
        for work in works
        for row in work["rows"]
        if row.get("error")
    ]
    return _table(["failed", "with"], rows) if rows else "None failed."


def _agreement(works: list[dict[str, Any]]) -> str:
    rows = []
    for system in _systems(works):
        if system.startswith(PUBLIC) or system == "jax-vmap":
            continue
        cells = []
        for model in MODELS:
            found = [
                row["sum_difference"]
                for work in works
                if work["model"] == model
                for row in work["rows"]
                if row["system"] == system and "sum_difference" in row
            ]
            cells.append(f"{max(found):.0e}" if found else "–")
        rows.append([NAMES[system], *cells])
    return _table(["", *MODELS], rows)


def _poisson(found: dict[str, Any]) -> str:
    examples = sum(found["sizes"])
    rows = []
    for row in sorted(found["rows"], key=lambda row: list(NAMES).index(row["system"])):
        if _failed(row):
            rows.append([NAMES[row["system"]], "failed", "", ""])
            continue
        seconds = np.array(row["seconds"])
        settled = np.median(seconds / np.array(found["sizes"]))
        rows.append(
            [
                NAMES[row["system"]],
                _number(examples / seconds.sum()),
                _number(1 / settled),
                str(row["compilations"]),
            ]
        )
    heading = ["", "examples/s, all steps", "median step", "programs compiled"]
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
            wanted.append(("the fastest Opacus", opacus, 1.5))
        else:
            jax_privacy = _best(works, lambda name: name.startswith("jax-privacy"))
            own = _best(works, lambda name: name.startswith("jax-sgd"))
            torch = _best(works, lambda name: name.startswith("torch-sgd"))
            wanted += [
                ("the fastest private peer", peers, 1.8),
                ("JAX-Privacy", jax_privacy, 4.0),
                ("JAX SGD", own, 1 / 1.1),
                ("PyTorch SGD", torch, 0.6),
            ]
        for than, other, goal in wanted:
            if ours is None or other is None:
                continue
            reached = ours[0] / other[0]
            rows.append(
                [
                    MODELS[model].split(",")[0],
                    f"tanager / {than}",
                    f"{_number(ours[0])} / {_number(other[0])}",
                    f"{reached:.2f}",
                    f"≥\u00a0{goal:.2f}",
                    "met" if reached >= goal else "**missed**",
                ]
            )
    heading = ["model", "ratio of", "examples/s", "measured", "goal", ""]
    return _table(heading, rows)


def _best(works: list[dict[str, Any]], wanted: Any) -> tuple[float, str] | None:
    rates = [
        (rate, row["system"])
        for work in works
        for row in work["rows"]
        if wanted(row["system"]) and (rate := _rate(work, row["system"])) is not None
    ]
    return max(rates) if rates else None


def draw(record: dict[str, Any], folder: Path) -> None:
    """Draw bars of examples per second, and lines where batches of a model vary."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "tanager"
    folder.mkdir(parents=True, exist_ok=True)
    _draw_bars(_columns(record["works"]), folder / "peers.svg")
    for model in dict.fromkeys(work["model"] for work in record["works"]):
        works = [work for work in record["works"] if work["model"] == model]
        if len(works) > 1:
            works.sort(key=lambda work: work["physical_batch"])
            _draw_lines(works, folder / f"peers-{model}.svg")


def _draw_bars(works: list[dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot

    systems = _systems(works)[::-1]
    columns = min(len(works), 3)
    count = -(-len(works) // columns)
    size = (1.8 + 2.2 * columns, 0.6 + 3 * count)
    figure, panels = pyplot.subplots(
        count, columns, figsize=size, sharey=True, squeeze=False
    )
    for axes in panels.flat[len(works) :]:
        axes.set_axis_off()
    for axes, work in zip(panels.flat, works, strict=False):
        best = max(rate for name in systems if (rate := _rate(work, name)))
        for place, name in enumerate(systems):
            rate = _rate(work, name)
            axes.barh(place, rate or 0, color=_COLOURS[name.split(":")[0]])
            tried = name in (row["system"] for row in work["rows"])
            told = _number(rate) if rate or not tried else "failed"
            axes.annotate(
                told,
                (rate or 0, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                color="0.2" if rate else "0.55",
            )
        axes.set_xlim(0, 1.28 * best)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        title = MODELS[work["model"]].split(",")[0].replace(" weight ", "\nweight ")
        axes.set_title(f"{title}\nbatch {work['physical_batch']}", fontsize=8)
        axes.tick_params(left=False)
    names = [NAMES[name].replace("**", "") for name in systems]
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(systems)), names, fontsize=8)
    figure.supxlabel("examples per second", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_lines(works: list[dict[str, Any]], path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for system in _systems(works):
        found = [
            (work["physical_batch"], _rate(work, system), row["peak_bytes"] / 2**20)
            for work in works
            for row in work["rows"]
            if row["system"] == system and not _failed(row)
        ]
        if not found:
            continue
        batches, rates, peaks = zip(*found, strict=True)
        style = {
            "color": _COLOURS[system.split(":")[0]],
            "marker": "o",
            "markersize": 3,
            "linestyle": ("-", "--", ":", "-.")[_variant(system)],
            "label": NAMES[system].replace("**", ""),
            "linewidth": 2 if system.startswith("tanager") else 1.2,
        }
        left.plot(batches, rates, **style)
        right.plot(batches, peaks, **style)
    for axes, title in ((left, "examples/s"), (right, "peak memory, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([work["physical_batch"] for work in works])
        axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.set_xlabel("physical batch")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    figure.suptitle(MODELS[works[0]["model"]], fontsize=11)
    handles, labels = left.get_legend_handles_labels()
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    figure.legend(handles, labels, fontsize=8, **place)
    figure.tight_layout()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def _variant(system: str) -> int:
    same = [name for name in NAMES if name.split(":")[0] == system.split(":")[0]]
    return min(same.index(system), 3)


if __name__ == "__main__":
    main()
