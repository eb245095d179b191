"""Examples reach the devices the same way, held there or read ahead of them."""

import json
import shutil

import jax
import numpy as np
import optax
import pytest
from PIL import Image
from small_runs import MECHANISM, examples, loss, predict, run, same

from tanager import data
from tanager.data import ArraySource, UnreadableExample
from tanager.parallel.layout import Layout
from tanager.privacy.ledger import Ledger
from tanager.privacy.mechanism import Mechanism
from tanager.training import feed


class Rows:
    """Read one by one; some of them cannot be."""

    def __init__(self, bad=()):
        self.arrays = examples()
        self.bad = set(bad)

    def __len__(self):
        return len(self.arrays["label"])

    def __getitem__(self, index):
        if index in self.bad:
            raise UnreadableExample(f"scan {index} is torn", int(index))
        return {name: values[index] for name, values in self.arrays.items()}


@pytest.fixture(scope="module")
def held():
    return run(seed=3)


def test_held_and_streamed_examples_train_the_same_model(held):
    streamed = run(data=Rows(), seed=3)
    assert same(held.params, streamed.params)
    assert same(held.average, streamed.average)
    assert 0 <= streamed.summary["wait_fraction"] <= 1


def test_what_is_too_large_for_a_device_is_streamed(held, monkeypatch):
    source, layout = ArraySource(examples()), Layout(2)
    assert feed.can_hold(source, layout)
    assert not feed.can_hold(Rows(), layout)
    monkeypatch.setattr(feed, "_SHARE_OF_MEMORY", 10**12)
    assert not feed.can_hold(source, layout)
    assert same(held.params, run(seed=3).params)


BAD = {7, 20}


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """A run that skips two examples: what it returned, and its folder."""
    out = tmp_path_factory.mktemp("skipping") / "run"
    return run(out, data=Rows(BAD), unreadable="skip", seed=3), out


def test_an_example_that_cannot_be_read_stops_the_run_which_can_then_skip_it(
    tmp_path, skipping
):
    with pytest.raises(UnreadableExample, match=r"scan (7|20) is torn"):
        run(tmp_path / "run", data=Rows(BAD), seed=3)
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() > 0
    again = run(tmp_path / "run", data=Rows(BAD), unreadable="skip", seed=3)
    assert same(again.params, skipping[0].params)
    assert again.epsilon == skipping[0].epsilon


def test_a_skipped_example_contributes_zero_and_is_counted_in_private(skipping):
    result, out = skipping

    def unless_bad(params, example):
        return (np.float32(1) - example["bad"]) * loss(params, example)

    marked = examples()
    numbers = np.arange(len(marked["label"]))
    marked["bad"] = np.isin(numbers, list(BAD)).astype(np.float32)
    zeroed = run(loss=unless_bad, data=marked, seed=3, evaluate=None)
    for one, other in zip(
        jax.tree.leaves(result.params), jax.tree.leaves(zeroed.params), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-6)
    lines = (out / "private/metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["unreadable"] for line in lines) > 0
    assert "unreadable" not in (out / "metrics.jsonl").read_text()


def test_what_was_skipped_once_stays_skipped_and_the_report_says_so(skipping, tmp_path):
    result, out = skipping
    assert result.summary["unreadable"] == "skip"
    with pytest.raises(ValueError, match="unreadable was 'skip' and is 'error'"):
        run(out, data=Rows(BAD), seed=3)
    for words in ("error", "skip"):
        run(tmp_path / words, data=Rows(), unreadable=words)
        told = "Images that could not be read contributed nothing"
        page = (tmp_path / words / "report.html").read_text()
        assert (told in page) == (words == "skip")
    with pytest.raises(ValueError, match=r"unreadable .*ignore"):
        run(unreadable="ignore")


def brightness(params, example):
    means = example["image"].astype(np.float32).mean((0, 1)) / 255
    return predict(params, {"x": means})


def loss_of_image(params, example):
    return optax.softmax_cross_entropy_with_integer_labels(
        brightness(params, example), example["label"]
    )


def run_on_folder(folder, out, **changes):
    dataset = data.load("folder", folder, image_size=8, stream=True)
    settings = {
        "loss": loss_of_image,
        "params": {"w": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.float32)},
        "data": dataset.train,
        "mechanism": Mechanism(0.5, 1.0, MECHANISM.steps),
        "evaluate": None,
        "physical_batch_size": 4,
        "seed": 3,
    }
    return run(out, **settings | changes)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of images, and a run on it."""
    folder = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for half, count in (("train", 12), ("test", 3)):
        for label, name in enumerate(("cat", "dog")):
            place = folder / half / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 128, (8, 8, 3), np.uint8) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.png")
    out = tmp_path_factory.mktemp("run") / "run"
    return folder, out, run_on_folder(folder, out)


@pytest.mark.slow
def test_a_folder_of_images_is_read_by_workers(images, tmp_path):
    folder, _, one = images
    by_a_worker = run_on_folder(folder, tmp_path / "run", workers=1)
    assert same(one.params, by_a_worker.params)
    assert np.any(one.params["w"] != 0)


def test_a_folder_that_changed_between_start_and_resume_is_refused(images):
    folder, out, _ = images
    moved = (folder / "train/cat/3.png").rename(folder / "train/dog/33.png")
    with pytest.raises(ValueError, match=r"another configuration: data"):
        run_on_folder(folder, out)
    moved.rename(folder / "train/cat/3.png")


def test_a_truncated_image_is_named(images, tmp_path):
    folder = shutil.copytree(images[0], tmp_path / "images")
    torn = folder / "train/dog/5.png"
    torn.write_bytes(torn.read_bytes()[:40])
    with pytest.raises(UnreadableExample, match=r"train/dog/5\.png"):
        run_on_folder(folder, tmp_path / "run")
    run_on_folder(folder, tmp_path / "other", unreadable="skip")
