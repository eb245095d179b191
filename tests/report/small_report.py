"""A small run's files, their report, and what a page says."""

import functools
import html.parser
import json
import math
from typing import Any

import pytest
import written

from tanager._files import json_text
from tanager.privacy import accountant, tan
from tanager.privacy.mechanism import Adjacency, Mechanism
from tanager.report import run_figures
from tanager.report.run_page import write_report


MARKER = "tr41ning-l0ss-of-a-private-image"


VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(html.parser.HTMLParser):
    """Collects tags, attributes and text, and insists on balanced tags."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.style, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        (self.style if "style" in self._open else self.text).append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


@functools.cache
def spent(mechanism, delta, by):
    return accountant.epsilon(mechanism, delta, by)


def run_files(*, seed=None, noise=1.7, adjacency="zero-out", classes=None):
    """A run on the digits as the trainer would leave it: config, result, metrics."""
    classes = classes or [str(digit) for digit in range(10)]
    mechanism = Mechanism(256 / 1437, noise, 200, Adjacency(adjacency))
    delta = 1e-4
    epsilon = spent(mechanism, delta, "pld")
    config: dict[str, Any] = {
        "recipe": {
            "name": "digits",
            "seed": seed,
            "crop_padding": 1,
            "flip": False,
            "optimizer_options": {"momentum": 0.9},
        },
        "physical_batch_size": 128,
        "model": "small-cnn",
        "dataset": "digits",
        "classes": classes,
        "parameters": 26_010,
        "optimizer": {"name": "sgd", "learning_rate": 2.0},
    }
    metrics = [
        {
            "step": step,
            "epsilon": epsilon * math.sqrt(step / 200),
            "test_accuracy": 0.95 - 0.8 * math.exp(-step / 40),
            "test_accuracy_ema": 0.97 - 0.85 * math.exp(-step / 30),
        }
        for step in range(20, 201, 20)
    ]
    by_rdp = None if adjacency == "replace-one" else spent(mechanism, delta, "rdp")
    result = written.RESULT | {
        "epsilon": epsilon,
        "delta": delta,
        "adjacency": adjacency,
        "private": seed is None and noise > 0,
        "epsilon_rdp": by_rdp,
        "test_accuracy": 0.9416,
        "test_accuracy_ema": 0.9638,
        "per_class": [
            {
                "class": name,
                "examples": 30 + index,
                "accuracy": 0.801 + 0.013 * index,
                "accuracy_ema": 0.846 + 0.012 * index,
            }
            for index, name in enumerate(classes)
        ],
        "steps": 200,
        "batch_size": 256,
        "sample_rate": mechanism.sample_rate,
        "noise_multiplier": noise,
        "examples": 1437,
        "eta": tan.eta(mechanism) if noise else math.inf,
        "eta_step": tan.eta_step(mechanism) if noise else math.inf,
        "total_noise": tan.total_noise(mechanism) if noise else 0.0,
        "seconds": 83.4,
        "examples_per_second": 613.2,
        "versions": {"tanager": "0.1.0", "dp-accounting": "0.6.0"},
    }
    return config, result, metrics


def write_run(folder, config, result, metrics):
    """Write a run's folder, with secrets in private/ that no page may show."""
    private = folder / "private"
    private.mkdir(parents=True)
    (folder / "config.json").write_text(json_text(config))
    (folder / "result.json").write_text(json_text(result))
    lines = "".join(json_text(line) + "\n" for line in metrics)
    (folder / "metrics.jsonl").write_text(lines)
    (private / "seed.json").write_text(json.dumps({"secret": MARKER}))
    secret = {"step": 1, "epsilon": 0.5, "test_accuracy": 0.77, "loss": MARKER}
    for name in ("metrics.jsonl", "config.json", "result.json"):
        (private / name).write_text(json.dumps(secret) + "\n")
    return folder


def report(folder, *files, drawn=False):
    """The page of a run, with its curves if asked for."""
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(run_figures, "curves", lambda *_: "")
        path = write_report(write_run(folder, *files))
    assert path == folder / "report.html"
    return path.read_text()
