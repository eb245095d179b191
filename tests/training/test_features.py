import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.data import ArraySource
from tanager.training import features as module
from tanager.training.features import cache_features


N, SHAPE = 23, (8, 8, 3)


def model(seed=0):
    draw = np.random.default_rng(seed)
    return {"w": draw.normal(size=(np.prod(SHAPE), 5)).astype(np.float32)}


def data(seed=0):
    draw = np.random.default_rng(seed)
    return {
        "image": draw.integers(0, 256, (N, *SHAPE), np.uint8),
        "label": np.arange(N, dtype=np.int32) % 4,
    }


def of_example(model, example):
    return jnp.tanh((example["image"].astype(jnp.float32) / 255).ravel() @ model["w"])


class Counting(ArraySource):
    """A source that can be pulled away after so many gathers."""

    def __init__(self, tree, most=10**9):
        super().__init__(tree)
        self.read, self.most = [], most

    def gather(self, indices):
        if len(self.read) >= self.most:
            raise OSError("the disk is gone")
        self.read.append(list(indices))
        return super().gather(indices)


def test_features_are_those_of_one_image_at_a_time(tmp_path):
    (tmp_path / "f").mkdir(mode=0o755)  # by its owner, who thought of no one else
    found = cache_features(
        of_example, model(), data(), tmp_path / "f", physical_batch_size=5
    )
    assert len(found) == N
    for index in (0, 4, 5, N - 1):
        image = {"image": data()["image"][index]}
        np.testing.assert_allclose(
            found[index]["features"], of_example(model(), image), rtol=1e-5, atol=1e-6
        )
        assert found[index]["label"] == index % 4
    assert isinstance(found.tree["features"].base, np.memmap)
    assert os.stat(tmp_path / "f").st_mode & 0o777 == 0o700


def test_what_is_there_is_read_and_not_computed_again(tmp_path):
    first = cache_features(of_example, model(), data(), tmp_path / "f")
    source, calls = Counting(data()), []
    again = cache_features(
        of_example,
        model(),
        source,
        tmp_path / "f",
        progress=lambda done, total: calls.append((done, total)),
    )
    np.testing.assert_array_equal(again.tree["features"], first.tree["features"])
    # One example for its shape, and the sample that says whose features these are.
    assert len(source.read) == 2
    assert calls == [(N, N)]


def test_a_pass_cut_off_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SAVE_SECONDS", -1.0)
    broken = Counting(data(), most=4)
    with pytest.raises(OSError, match="the disk is gone"):
        cache_features(
            of_example, model(), broken, tmp_path / "f", physical_batch_size=5
        )
    assert json.loads((tmp_path / "f/features.json").read_text())["done"] == 10
    source = Counting(data())
    found = cache_features(
        of_example, model(), source, tmp_path / "f", physical_batch_size=5
    )
    assert source.read[2] == [10, 11, 12, 13, 14]  # all that was read was computed
    whole = cache_features(of_example, model(), data(), tmp_path / "whole")
    np.testing.assert_allclose(
        found.tree["features"], whole.tree["features"], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(found.tree["label"], whole.tree["label"])


def test_of_two_processes_one_computes_and_the_other_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_SECONDS", 0.01)
    begun, seen = threading.Event(), threading.Event()

    class Held(Counting):
        def gather(self, indices):
            if len(self.read) == 2:  # the first that it computes on
                begun.set()
                assert seen.wait(60)
            return super().gather(indices)

    def compute(source, progress):
        return cache_features(
            of_example, model(), source, tmp_path / "f", progress=progress
        )

    shown, waiting = [], Counting(data())
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(compute, Held(data()), lambda done, total: None)
        assert begun.wait(60)

        def show(done, total):
            shown.append(done)
            seen.set()

        second = compute(waiting, show)
        same = np.array_equal(second.tree["features"], first.result().tree["features"])
    assert same
    assert len(waiting.read) == 2
    assert (shown[0], shown[-1]) == (0, N)


def test_features_that_could_mix_examples_are_refused(tmp_path):
    def mixing(model, example):
        made = of_example(model, example)
        shape = jax.typeof(made)
        return jax.pure_callback(
            lambda x: x - x.mean(0), shape, made, vmap_method="broadcast_all"
        )

    with pytest.raises(ValueError, match="features uses pure_callback"):
        cache_features(mixing, model(), data(), tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    place = tmp_path_factory.mktemp("cached") / "f"
    cache_features(of_example, model(), data(), place)
    return place


def doubled(model, example):
    return 2 * of_example(model, example)


@pytest.mark.parametrize(
    ("function", "seed", "examples", "differs"),
    [
        (of_example, 1, data(), "weights"),
        (of_example, 0, data(1), "data"),
        (doubled, 0, data(), "function"),
        (
            of_example,
            0,
            {name: values[:-1] for name, values in data().items()},
            "data, shape",
        ),
    ],
)
def test_features_of_another_origin_are_refused(
    cached, function, seed, examples, differs
):
    before = (cached / "features.npy").read_bytes()
    with pytest.raises(ValueError, match=f"holds features of another {differs}:"):
        cache_features(function, model(seed), examples, cached)
    assert (cached / "features.npy").read_bytes() == before


def test_features_that_another_program_wrote_there_are_refused(cached):
    np.save(cached / "features.npy", np.zeros((23, 5), np.float64))
    with pytest.raises(ValueError, match=r"it holds float64\[23, 5\]"):
        cache_features(of_example, model(), data(), cached)


def test_a_full_disk_is_noticed_before_work(tmp_path, monkeypatch):
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})
    )
    with pytest.raises(
        ValueError, match=r"needs 552 bytes, and 10 bytes are free: .*--features"
    ):
        cache_features(of_example, model(), data(), tmp_path / "f")
    assert not (tmp_path / "f/features.npy").exists()
