"""The report of a run: one HTML page that refers to nothing outside itself.

It is made of the run's public files (config.json, metrics.jsonl, result.json), never of
`private/`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._files import write_text
from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.privacy.shown import upper
from tanager.report import guarantee, run_figures
from tanager.report.guarantee import number, percent
from tanager.report.render import render
from tanager.report.run_files import read_config, read_metrics, read_result


_Fields = Mapping[str, Any]


def write_report(run: Path) -> Path:
    """Write the report of a finished run.

    Args:
        run: the run's folder, with config.json and result.json; metrics.jsonl may be
            missing, and its last line torn.

    Returns:
        Path of the page, ``run/report.html``, which is replaced whole.

    Raises:
        ValueError: the folder holds no finished run, or one of its files is damaged.
    """
    run = Path(run)
    for name in ("config.json", "result.json"):
        if not (run / name).exists():
            validate.refuse(
                "run", str(run), f"has no {name}", "give the folder of a finished run"
            )
    config, result, metrics = read_config(run), read_result(run), read_metrics(run)
    subject = [config.get("model"), config.get("dataset")]
    content = render(
        "run.html",
        kind="tanager run report",
        subject=" on ".join(str(part) for part in subject if part) or "a model",
        config=config,
        result=result,
        search=result.get("search"),
        guarantee=guarantee,
        large=result["epsilon"] is not None and result["epsilon"] >= LARGE_EPSILON,
        tiles=_tiles(result),
        curves="" if result.get("search") else run_figures.curves(metrics),
        tested=any(line.get("test_accuracy") is not None for line in metrics),
        predicted=_predicted(config.get("study"), result),
        budget=_budget(result),
        settings=_settings(config, result),
    )
    report = run / "report.html"
    write_text(report, content)
    return report


def _tiles(result: _Fields) -> dict[str, str]:
    tiles = {
        "ε": upper(result["epsilon"]) if result["private"] else "no guarantee",
        "δ": number(result["delta"]),
    }
    if search := result.get("search"):
        tiles["held-out accuracy, with noise"] = percent(search["noisy_accuracy"])
    else:
        tiles["test accuracy, average"] = percent(result.get("test_accuracy_ema"))
        tiles["test accuracy, parameters"] = percent(result.get("test_accuracy"))
    if (vote := result.get("test_accuracy_vote_ema")) is not None:
        tiles["test accuracy, average, vote of views"] = percent(vote)
    return tiles


def _predicted(study: _Fields | None, result: _Fields) -> dict[str, Any]:
    if not study:
        return {}
    rows = {"trial of the search that found these settings": study["trial"]}
    if prediction := study.get("prediction"):
        low, high = percent(prediction["low"]), percent(prediction["high"])
        interval = f"{100 * prediction['confidence']:g} % interval of one run"
        rows |= {
            "predicted accuracy": percent(prediction["accuracy"]),
            interval: f"{low} to {high}",
        }
    obtained = percent(result.get("test_accuracy_ema"))
    return rows | {"obtained, average of parameters": obtained}


def _budget(result: _Fields) -> dict[str, Any]:
    claim = "" if result["private"] else ", NOT guaranteed for this run"
    if result.get("search"):
        spent = {f"ε of the whole search, by RDP{claim}": upper(result["epsilon"])}
    else:
        rdp = result.get("epsilon_rdp")
        spent = {
            f"ε by PLD, tight{claim}": upper(result["epsilon"]),
            f"ε by RDP, as papers report it{claim}": (
                f"none under {result['adjacency']}" if rdp is None else upper(rdp)
            ),
        }
    return spent | {
        "δ": result["delta"],
        "adjacency": result["adjacency"],
        "sample rate q": result["sample_rate"],
        "noise multiplier σ": result["noise_multiplier"],
        "updates charged": result["steps"],
        "signal-to-noise ratio of one update, η_step": result.get("eta_step"),
        "signal-to-noise ratio of the run, η": result.get("eta"),
        "total noise, Σ = 1/η": result.get("total_noise"),
    }


def _settings(config: _Fields, result: _Fields) -> dict[str, Any]:
    seconds, classes = result.get("seconds"), config.get("classes")
    settings = {
        "model": config.get("model"),
        "parameters trained": config.get("parameters"),
        "data set": config.get("dataset"),
        "classes": classes and len(classes),
        "training examples": result["examples"],
        "expected batch size": result["batch_size"],
        "physical batch size": config.get("physical_batch_size"),
        "clipping norm": result["clip_norm"],
        "optimizer": config.get("optimizer"),
        "training time": None if seconds is None else _duration(seconds),
        "examples per second": result.get("examples_per_second"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
