"""The report of a run: one HTML page that stands alone.

It is made of the run's public files (config.json, metrics.jsonl, result.json), never of
`private/`, and refers to nothing outside itself: no script, no font, no link.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tanager import _validate as validate
from tanager._files import write_text
from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.privacy.shown import upper
from tanager.report import guarantee, page, run_figures
from tanager.report.guarantee import number, percent, text
from tanager.report.page import escape
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
                "run",
                str(run),
                f"has no {name}",
                "a report is written of the folder of a finished run",
            )
    content = _page(read_config(run), read_result(run), read_metrics(run))
    report = run / "report.html"
    write_text(report, content)
    return report


def _page(config: _Fields, result: _Fields, metrics: Sequence[_Fields]) -> str:
    title = "tanager run report"
    subject = [config.get("model"), config.get("dataset")]
    name = " on ".join(str(part) for part in subject if part) or "a model"
    verdict = _guarantee if result["private"] else _no_guarantee
    parts = [
        f"<header><p class=kind>{title}</p><h1>{escape(name)}</h1></header>",
        verdict(config, result),
        _tiles(result),
        "" if result.get("search") else _training(metrics),
        _predicted(config, result),
        _classes(result),
        _section("Budget", _budget(result)),
        _section("Configuration", _configuration(config, result)),
        _section("Versions", _table(result.get("versions") or {})),
        _verification(result),
    ]
    return page.standalone(f"{title}: {name}", "\n".join(parts))


### The guarantee


def _guarantee(config: _Fields, result: _Fields) -> str:
    large = result["epsilon"] >= LARGE_EPSILON
    kind, caution = "guarantee", ""
    if large:
        kind = "danger"
        caution = (
            "<p><strong>An ε this large protects next to nothing.</strong> It is "
            "right for a simulation on public data; do not release such a model of "
            "private data.</p>"
        )
    return (
        f"<section class={kind}><h2>The guarantee</h2>"
        f"<p class=claim>This model is <strong>{guarantee.claim(result)}</strong>-"
        f"differentially private under {escape(result['adjacency'])}.</p>{caution}"
        f"<p>{guarantee.mechanism(result)} {escape(guarantee.accounting(result))} It "
        f"covers {_covered(result)}.</p>"
        "<p>It rests on these assumptions:</p>"
        f"{_list(guarantee.assumptions(result))}</section>"
    )


def _covered(result: _Fields) -> str:
    if result.get("search"):
        return "the final parameters, their average and all numbers on this page"
    return (
        "the final parameters, their average, every checkpoint but for its times, and "
        "all numbers on this page but the training time and speed"
    )


def _no_guarantee(config: _Fields, result: _Fields) -> str:
    otherwise = ""
    if result["noise_multiplier"] != 0:
        where = "Alone" if result.get("private_search") else "With a secret seed"
        otherwise = (
            f"<p>{guarantee.mechanism(result)} {where} these settings spend "
            f"ε = {upper(result['epsilon'])} at δ = {number(result['delta'])} "
            f"({escape(result['adjacency'])}, "
            f"{escape(str(result['accountant']).upper())}); this run must not claim "
            "that.</p>"
        )
    return (
        "<section class=danger role=alert><h2>NOT PRIVATE</h2>"
        "<p class=claim>This model has no differential privacy guarantee. "
        f"{guarantee.reason_against(result)} Do not release it if the data are private."
        f"</p>{otherwise}</section>"
    )


def _verification(result: _Fields) -> str:
    program = "\n".join(map(escape, guarantee.recomputation(result).splitlines()))
    return _section(
        "How to verify",
        "<p>Compute ε again from the mechanism, without tanager:</p>"
        f"<pre id=verify>{program}</pre>"
        f"{_ledger(result)}",
    )


def _ledger(result: _Fields) -> str:
    if result.get("search"):
        return "<p>Every run has its ledger in private/, as their number is secret.</p>"
    return (
        "<p>ledger.jsonl, next to this page, lists every update that was charged, each "
        "before it was made; the settings above must be those of all its lines.</p>"
    )


### The numbers


def _tiles(result: _Fields) -> str:
    tiles = [
        ("ε", upper(result["epsilon"]) if result["private"] else "no guarantee"),
        ("δ", number(result["delta"])),
        ("test accuracy, average", percent(result.get("test_accuracy_ema"))),
        ("test accuracy, parameters", percent(result.get("test_accuracy"))),
    ]
    if search := result.get("search"):
        tiles[2:] = [
            ("held-out accuracy, with noise", percent(search["noisy_accuracy"]))
        ]
    if (vote := result.get("test_accuracy_vote_ema")) is not None:
        tiles.append(("test accuracy, average, vote of views", percent(vote)))
    shown = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>"
        for label, value in tiles
    )
    return f"<dl class=tiles>{shown}</dl>"


def _training(metrics: Sequence[_Fields]) -> str:
    picture = run_figures.curves(metrics)
    if not picture:
        return _section("Training", "<p>No metrics were recorded.</p>")
    if any(line.get("test_accuracy") is not None for line in metrics):
        caption = "Test accuracy of the parameters and of their average, and ε spent."
    else:
        caption = "ε spent. There was no test set to measure accuracy on."
    return _section(
        "Training",
        f"<figure>{picture}<figcaption>{caption}</figcaption></figure>",
    )


def _predicted(config: _Fields, result: _Fields) -> str:
    study = config.get("study")
    if not study:
        return ""
    rows = {"trial of the search that these settings come from": study["trial"]}
    prediction = study.get("prediction")
    if prediction:
        rows |= {
            "predicted accuracy": percent(prediction["accuracy"]),
            f"{100 * prediction['confidence']:g} % interval of one run": (
                f"{percent(prediction['low'])} to {percent(prediction['high'])}"
            ),
        }
    rows["obtained, average of parameters"] = percent(result.get("test_accuracy_ema"))
    return _section(
        "Predicted by a search",
        f"<p>The settings were found by the search in {escape(study['path'])}, whose "
        "simulations have no privacy guarantee: see its report. The prediction is for "
        "examples held out of the training data; what was obtained is on the test "
        f"examples.</p>{_table(rows)}",
    )


def _classes(result: _Fields) -> str:
    classes = result.get("per_class")
    if not classes:
        return ""
    rows = "".join(
        f"<tr><th scope=row>{escape(str(each['class']))}</th>"
        f"<td>{each['examples']:,}</td>"
        f"<td>{_bar(each['accuracy'], 'raw')}</td>"
        f"<td>{_bar(each['accuracy_ema'], 'average')}</td></tr>"
        for each in classes
    )
    return _section(
        "Accuracy by class",
        "<p>Privacy is often paid for by small or unusual classes.</p>"
        "<table class=classes><thead><tr><th>class</th><th>test examples</th>"
        "<th>parameters</th><th>average of parameters</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>",
    )


def _bar(accuracy: float | None, series: str) -> str:
    if accuracy is None or not math.isfinite(accuracy):
        return "none"
    width = 100 * min(max(accuracy, 0.0), 1.0)
    return (
        f"<span class=bar><i class={series} style='width:{width:.1f}%'></i></span>"
        f" {percent(accuracy)}"
    )


def _budget(result: _Fields) -> str:
    claim = "" if result["private"] else ", NOT guaranteed for this run"
    if result.get("search"):
        spent = {f"ε of the whole search, by RDP{claim}": upper(result["epsilon"])}
    else:
        rdp = result.get("epsilon_rdp")
        spent = {
            f"ε by PLD, tight{claim}": upper(result["epsilon"]),
            f"ε by RDP, as the papers report it{claim}": (
                f"none under {result['adjacency']}" if rdp is None else upper(rdp)
            ),
        }
    return _table(
        spent
        | {
            "δ": result["delta"],
            "adjacency": result["adjacency"],
            "sample rate q": result["sample_rate"],
            "noise multiplier σ": result["noise_multiplier"],
            "updates charged": result["steps"],
            "signal-to-noise ratio of one update, η_step": result.get("eta_step"),
            "signal-to-noise ratio of the run, η": result.get("eta"),
            "total amount of noise, Σ = 1/η": result.get("total_noise"),
        }
    )


def _configuration(config: _Fields, result: _Fields) -> str:
    seconds, rate = result.get("seconds"), result.get("examples_per_second")
    run = {
        "model": config.get("model"),
        "parameters trained": config.get("parameters"),
        "data set": config.get("dataset"),
        "classes": _count(config.get("classes")),
        "training examples": result["examples"],
        "expected batch size": result["batch_size"],
        "physical batch size": config.get("physical_batch_size"),
        "clipping norm": result["clip_norm"],
        "optimizer": config.get("optimizer"),
        "training time": None if seconds is None else _duration(seconds),
        "examples per second": rate,
    }
    table = _table({name: run[name] for name in run if run[name] is not None})
    recipe = config.get("recipe")
    if not recipe:
        return table
    return (
        f"{table}"
        "<details><summary>Every field of the recipe</summary>"
        f"{_table(recipe)}</details>"
    )


### Text


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _table(rows: _Fields) -> str:
    shown = "".join(
        f"<tr><th scope=row>{escape(str(name))}</th><td>{escape(text(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><tbody>{shown}</tbody></table>"


def _count(classes: Any) -> Any:
    return len(classes) if isinstance(classes, list | tuple) else classes


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
