"""Damaged files of a run's folder: used, or refused by one message with their name."""

import json
from contextlib import closing

import equinox as eqx
import jax
import numpy as np
import pytest
from test_export import finished_run

import mutations
import tanager
from switch import FULL
from tanager import models
from tanager.seed import Seed
from tanager.training import fingerprint
from tanager.training.features import _begin, _opened
from tanager.training.metrics import _keep_until
from tanager.training.norms import BINS, Norms
from tanager.training.resume import Repeats
from tanager.training.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    template = eqx.filter_eval_shape(
        models.create, "linear", classes=2, image_shape=(2, 2, 1), key=jax.random.key(0)
    )
    model = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), template)
    config = {
        "model": "linear",
        "dataset": "pets",
        "classes": ["cat", "dog"],
        "architecture": {"name": "linear", "image_shape": [2, 2, 1], "options": {}},
        "preprocessing": {"mean": [0.5], "std": [0.5]},
        "recipe": {"name": "folder", "data": "/home/alice"},
        "weights": {"weights": "hf:timm/vit", "sha256": "ab", "changes": ["head"]},
    }
    return finished_run(tmp_path / "run", model, config)


def printable(folder):
    for name in ("README.md", "config.json"):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_exports(run, tmp_path, name):
    """Of 6568 such changes, 648 once ended in a traceback."""
    file = run / name
    good = json.loads(file.read_text())
    fuzzed = mutations.Fuzz(name)
    made = []

    def read():
        to = tmp_path / f"to-{len(made)}"
        made.append(to)
        try:
            printable(tanager.export(run, to))
        except ValueError as error:
            if "does not fit the template" in str(error):
                # Another model: the file of weights is named.
                raise ValueError(f"{name}: {error}") from error
            raise

    for text in mutations.of_json(good, 150 if FULL else 60):
        file.write_bytes(text)
        fuzzed(read)
    fuzzed.end()
    # Whatever changes in result.json, it differs from the ledger.
    assert fuzzed.read or name == "result.json"


def test_exported_weights(run, tmp_path):
    file = run / "model-ema.safetensors"
    good = file.read_bytes()
    fuzzed = mutations.Fuzz(file.name)
    for number, content in enumerate(mutations.of_bytes(good, 80)):
        file.write_bytes(content)
        fuzzed(tanager.export, run, tmp_path / f"to-{number}")
    fuzzed.end()


def test_seeds(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.seed(17)
    file = folder.private / "seed.json"
    good = json.loads(file.read_text())
    fuzzed = mutations.Fuzz(str(folder.path))
    for text in mutations.of_json(good, 400):
        file.write_bytes(text)
        fuzzed(folder.seed, 17)
    fuzzed.end()


LINES = [{"step": step, "epsilon": 0.1, "norms": [1] * BINS} for step in (1, 2, 3)]


def test_metrics_that_are_picked_up_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    good = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(LINES[0], 400):
        file.write_bytes(text + b"\n" + good)
        fuzzed(_keep_until, file, 2, 0o600)
    fuzzed.end()


def test_norms(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "config.json").write_text('{"clip_norm": 1.0}')
    file = tmp_path / "private/metrics.jsonl"
    fuzzed = mutations.Fuzz(str(tmp_path))
    for text in mutations.of_json(LINES, 400):
        try:
            lines = [json.dumps(line).encode() for line in json.loads(text)]
        except (ValueError, TypeError, RecursionError):
            lines = [text]
        file.write_bytes(b"\n".join([*lines, b""]))
        fuzzed(Norms.read, tmp_path)
    fuzzed.end()


def test_features(tmp_path):
    made_of = {"function": "a", "weights": "b", "data": "c", "shape": [10, 4]}
    place = tmp_path / "features"
    place.mkdir()
    _begin(place, made_of, (10,))
    record, array = place / "features.json", place / "features.npy"
    good = json.loads(record.read_text())
    fuzzed = mutations.Fuzz(place.name)
    for text in mutations.of_json(good, 400):
        record.write_bytes(text)
        fuzzed(_begin, place, made_of, (10,))
    fuzzed.end()
    fuzzed, content = mutations.Fuzz(array.name), array.read_bytes()
    for changed in mutations.of_bytes(content, 400):
        array.write_bytes(changed)
        fuzzed(_opened, array, (10, 4), np.float32, "r")
    fuzzed.end()


@pytest.mark.parametrize("name", ["config.json", "fingerprint.json"])
def test_identities(tmp_path, name):
    folder, seed = RunFolder(tmp_path / "run"), Seed.from_int(3)
    config = {"model": "linear", "unreadable": "error", "sizes": [1, 2]}
    prints, around = {"loss": "ab"}, {"versions": {"jax": "1"}, "cores": 2}
    asked = folder, seed, config, prints, around
    fingerprint.check_fingerprint(*asked)
    file = folder.config if name == "config.json" else folder.private / name
    good = json.loads(file.read_text())
    fuzzed = mutations.Fuzz(str(folder.path))
    for text in mutations.of_json(good, 400 if FULL else 150):
        file.write_bytes(text)
        fuzzed(fingerprint.check_fingerprint, *asked)
        file.unlink()
        fingerprint.check_fingerprint(*asked)
    fuzzed.end()


def test_checksums_of_steps(tmp_path):
    file = tmp_path / "sums.jsonl"
    with closing(Repeats(file, "a")) as made:
        for step in range(3):
            made.check(step, np.arange(4, dtype=np.uint32))
    good = file.read_bytes()
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(json.loads(good.splitlines()[0]), 400):
        file.write_bytes(text + b"\n" + good)
        fuzzed(lambda: Repeats(file, "a").close())
    fuzzed.end()
