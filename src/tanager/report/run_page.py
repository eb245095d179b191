"""The report of a run: one HTML page that refers to nothing outside itself.

It is made of the run's public files (config.json, metrics.jsonl, result.json), never of
`private/`.
"""

from pathlib import Path

from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.report import guarantee, run_figures
from tanager.report.render import require, write_page
from tanager.report.run_files import read_config, read_metrics, read_result


def write_report(run: Path) -> Path:
    """Write the report of a finished run.

    Args:
        run: the run's folder, with config.json and result.json; metrics.jsonl may be
            missing, and its last line torn.

    Returns:
        Path of the page, ``run/report.html``.

    Raises:
        ValueError: the folder holds no finished run, or one of its files is damaged.
    """
    run = Path(run)
    for name in ("config.json", "result.json"):
        require(run, "run", name, "give the folder of a finished run")
    config, result, metrics = read_config(run), read_result(run), read_metrics(run)
    subject = [config.get("model"), config.get("dataset")]
    return write_page(
        run,
        "run.html",
        kind="tanager run report",
        subject=" on ".join(str(part) for part in subject if part) or "a model",
        config=config,
        result=result,
        search=result.get("search"),
        guarantee=guarantee,
        large=result["epsilon"] is not None and result["epsilon"] >= LARGE_EPSILON,
        curves="" if result.get("search") else run_figures.curves(metrics),
        tested=any(line.get("test_accuracy") is not None for line in metrics),
        study=config["study"],
    )
