"""The report of a run: one HTML page that refers to nothing outside itself.

It is made of the run's public files (config.json, metrics.jsonl, result.json), never of
`private/`.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from tanager.measures import HEADLINES
from tanager.report import guarantee, run_figures
from tanager.report.evaluation_page import by_class
from tanager.report.render import without_folders, write_page
from tanager.report.run_files import read_config, read_metrics, read_result


_Fields = Mapping[str, Any]


def write_report(run: Path) -> Path:
    """Write report.html into the folder of a finished run, and return its path.

    metrics.jsonl may be missing, and its last line torn.
    """
    run = Path(run)
    config, result, metrics = read_config(run), read_result(run), read_metrics(run)
    averaged = config.get("ema_decay") != 0
    average = (result["measures"] or {}).get("average") or {}
    per_class = () if config["multi_label"] else result["per_class"] or ()
    shape = (config["architecture"] or {}).get("image_shape")
    return write_page(
        run / "report.html",
        "run.html",
        kind="Report on a model trained with tanager",
        subject=title(config),
        config=config,
        recipe=without_folders(config["recipe"] or {}),
        result=result,
        measures=result["measures"],
        averaged=averaged,
        several=bool(config["multi_label"]),
        headlines=HEADLINES,
        **by_class(per_class, average),
        shape=shape,
        on_features=shape is not None and len(shape) == 1,
        held_out=(config["recipe"] or {}).get("validation_examples"),
        search=result.get("search"),
        guarantee=guarantee,
        weakness=guarantee.weakness(result),
        curves=run_figures.curves(metrics, averaged, result["private"]),
        tested=any(
            line.get(f"test_{name}") is not None
            for line in metrics
            for name in HEADLINES
        ),
        study=without_folders(config["study"]),
    )


def title(config: _Fields) -> str:
    """Return the name of the data set; of a folder or file, as the user gave it.

    Only the last part of a path is named: those before it can tell who the user is.
    """
    name, recipe = config.get("dataset"), config["recipe"] or {}
    given = recipe.get("data") if name == "folder" else recipe.get("features_from")
    if name in ("folder", "features") and isinstance(given, str):
        last = PurePosixPath(given).name
        return last if last.strip(".") else f"a {name} of images"
    return str(name or config.get("model") or "a model")
