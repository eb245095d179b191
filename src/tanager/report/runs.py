"""Several runs at once: what each of them is and reached, and how they differ."""

import contextlib
import datetime
import fcntl
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager.privacy.accountant import Accountant, composed_epsilon
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.report import run_figures
from tanager.report.guarantee import unit
from tanager.report.render import require, write_page
from tanager.report.run_files import read_config, read_metrics, read_result


RESULTS = {
    "state": "state",
    "epsilon": "ε alone",
    "delta": "δ",
    "unit": "unit of privacy",
    "test_accuracy": "test accuracy",
    "test_accuracy_ema": "test accuracy, average of parameters",
    "test_auroc_ema": "test AUROC, average of parameters",
    "test_average_precision_ema": "test average precision, average of parameters",
    "noise_multiplier": "noise multiplier",
    "steps": "updates",
    "seconds": "training time",
}
"""What a comparison shows of each run, with its name on the page."""

_OF_LABELS = {"test_auroc_ema", "test_average_precision_ema"}
_PLACES = {"out", "data", "features", "account", "began"}


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, the oldest first, or the run that it is."""
    if not folder.is_dir():
        remedy = "name the folder of your runs, or train first: tanager train digits"
        validate.refuse("folder", str(folder), "is not a folder", remedy)
    if _is_run(folder):
        return [folder]
    return sorted(filter(_is_run, folder.iterdir()), key=_began)


def describe(run: Path) -> dict[str, Any]:
    """Return what a run is and reached so far, as JSON.

    The ε of an unfinished run is that of all steps in its ledger. The state says if a
    ledger denies steps, noise or sample rate of a finished one; ε is not computed.
    """
    require(run, "run", "config.json", "give the folder of a run")
    config, metrics = read_config(run), read_metrics(run)
    finished = (run / "result.json").exists()
    result = read_result(run) if finished else {**(metrics[-1] if metrics else {})}
    result["unit"] = unit(result if finished else config)
    private = result.get("private", config.get("private"))
    if not finished and config["delta"] and (run / "ledger.jsonl").exists():
        spent = Ledger.read(run / "ledger.jsonl").mechanisms()
        by = config.get("accountant", Accountant.PLD)
        epsilon = composed_epsilon(spent, config["delta"], by)
        noisy = math.isfinite(epsilon)
        result |= {"epsilon": epsilon if noisy else None, "delta": config["delta"]}
        private = private and noisy
    began = datetime.datetime.fromtimestamp(_began(run))
    recipe = config.get("recipe") or {}
    state = "running" if not finished and _is_held(run) else "stopped"
    if finished:
        state = "denied by its ledger" if _is_denied(run, result) else "finished"
    return {
        "run": str(run),
        "recipe": recipe.get("name"),
        "began": began.isoformat(" ", "minutes"),
        "state": state,
        "private": private,
        **{name: result.get(name) for name in RESULTS if name != "state"},
    }


def write_comparison(runs: Sequence[Path], page: Path) -> Path:
    """Write a page with the results, curves and differing settings of some runs."""
    if len(runs) < 2:
        rule = "must name two runs or more"
        validate.refuse("runs", " ".join(map(str, runs)), rule)
    described = [describe(run) for run in runs]
    settings = [_settings(read_config(run)) for run in runs]
    names = list(dict.fromkeys(name for each in settings for name in each))
    rows = {name: [each.get(name) for each in settings] for name in names}
    differ = {name: row for name, row in rows.items() if len({*map(repr, row)}) > 1}
    metrics = {str(run): read_metrics(run) for run in runs}
    for run, each in zip(metrics, described, strict=True):
        if not each["private"]:  # It must not claim an ε.
            metrics[run] = [{**line, "epsilon": None} for line in metrics[run]]
    return write_page(
        page,
        "comparison.html",
        kind="tanager comparison",
        subject=f"{len(runs)} runs",
        runs=described,
        labels={
            name: words
            for name, words in RESULTS.items()
            if name not in _OF_LABELS or any(each[name] for each in described)
        },
        settings=differ,
        curves=run_figures.compared(metrics),
    )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are worth comparing."""
    found = config.get("recipe") or config
    return {name: value for name, value in found.items() if name not in _PLACES}


def _is_run(folder: Path) -> bool:
    """Return whether a folder is a run's: searches and audits have no such ledger."""
    names = "config.json", "ledger.jsonl"
    return all((folder / name).exists() for name in names)


def _began(run: Path) -> float:
    """Return when a run began, in seconds: by config.json, else when it got a seed."""
    with contextlib.suppress(ValueError):
        if (began := read_config(run)["began"]) is not None:
            return datetime.datetime.fromisoformat(began).timestamp()
    seed, config = run / "private/seed.json", run / "config.json"
    return (seed if seed.exists() else config).stat().st_mtime


def _is_denied(run: Path, result: Mapping[str, Any]) -> bool:
    """Return whether the ledger of a run charges other steps than result.json says."""
    if result.get("search") or not (run / "ledger.jsonl").exists():
        return False
    names = "sample_rate", "noise_multiplier", "steps", "adjacency"
    claimed = Mechanism(*(result[name] for name in names))
    charged = Ledger.read(run / "ledger.jsonl").mechanisms()
    counts = result["class_counts_noise"] is not None
    return claimed not in charged or len(charged) != 1 + counts


def _is_held(run: Path) -> bool:
    """Return whether a process is writing the ledger of a run, which it locks."""
    if not (run / "ledger.jsonl").exists():
        return False
    with open(run / "ledger.jsonl", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:  # On a disk without locks no run goes on.
            return isinstance(error, BlockingIOError)
    return False
