"""What every source that decodes on access must do, format by format."""

import concurrent.futures
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
import small_sources as small
from small_sources import ALL_FORMATS, ENCODED, ENCODED_FORMATS, IMAGES, LABELS

from tanager.data import (
    ArraySource,
    Source,
    StreamedSource,
    UnreadableExample,
    gather,
    streamed,
    subset,
)
from tanager.data.streamed import into_memory


BAD = 7
encoded_formats = pytest.mark.parametrize("name", ENCODED_FORMATS)
all_formats = pytest.mark.parametrize("name", ALL_FORMATS)


@pytest.fixture(scope="module")
def elsewhere():
    """A spawned process, as those that read ahead of training."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        yield pool


def made(name, path):
    small.write_made(name, path)
    return small.open_made(name, path)


def spoilt(name, path):
    contents = [*ENCODED[:BAD], ENCODED[BAD][:-60], *ENCODED[BAD + 1 :]]
    small.write_made(name, path, contents)
    return small.open_made(name, path)


@all_formats
def test_examples_are_the_pictures(tmp_path, name):
    source = made(name, tmp_path)
    assert all(isinstance(source, each) for each in (Source, StreamedSource))
    assert (len(source), source.shape) == (small.COUNT, small.SHAPE)
    for index, (image, label) in enumerate(zip(IMAGES, LABELS, strict=True)):
        example = source[index]
        assert list(example) == ["image", "label"]
        np.testing.assert_array_equal(example["image"], image)
        assert example["image"].dtype == np.uint8
        assert (example["label"].dtype, example["label"].shape) == (np.int32, ())
        assert example["label"] == label
    np.testing.assert_array_equal(source.labels, LABELS)
    assert source.labels.dtype == np.int32
    for index in (-1, small.COUNT):
        with pytest.raises(IndexError, match="must be from 0 to 9"):
            source[index]


@all_formats
@pytest.mark.parametrize("indices", [[3], [9, 0, 0, 6, 5], []])
def test_gather_stacks_the_examples(tmp_path, name, indices):
    batch = gather(made(name, tmp_path), np.array(indices, np.int64))
    np.testing.assert_array_equal(batch["image"], IMAGES[indices])
    np.testing.assert_array_equal(batch["label"], LABELS[indices])
    assert batch["label"].dtype == np.int32


@all_formats
def test_spawned_processes_read_it_without_jax(tmp_path, name, elsewhere):
    source = made(name, tmp_path)
    assert source[2]["label"] == 0  # Its files are open here.
    view = subset(source.relabelled(LABELS + 5), [9, 4])
    batch, jax = elsewhere.submit(small.read_elsewhere, view).result()
    np.testing.assert_array_equal(batch["image"], IMAGES[[9, 4]])
    np.testing.assert_array_equal(batch["label"], [7, 6])
    assert not jax


@all_formats
def test_what_is_pickled_is_the_listing_alone(tmp_path, name):
    source = made(name, tmp_path)
    small.read_elsewhere(source)
    assert len(pickle.dumps(source)) < IMAGES.nbytes


@all_formats
def test_identity_is_of_what_is_listed(tmp_path, name):
    source = made(name, tmp_path / "here")
    before = source.identity()
    assert len(before) == 32
    assert small.open_made(name, tmp_path / "here").identity() == before
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    assert small.open_made(name, tmp_path / "elsewhere").identity() == before

    view = subset(source, [1, 2])
    assert isinstance(view, StreamedSource)
    turned, other = subset(source, [2, 1]), source.relabelled(LABELS + 1)
    assert isinstance(turned, StreamedSource)
    assert len({before, *(one.identity() for one in (view, turned, other))}) == 4

    changed = IMAGES.copy()
    changed[4] = 0
    if name in ENCODED_FORMATS:
        changed = [small.png(image) for image in changed]
    small.write_made(name, tmp_path / "here", changed)
    assert small.open_made(name, tmp_path / "here").identity() != before


@encoded_formats
def test_one_unreadable_example_is_named_and_the_others_are_read(
    tmp_path, name, elsewhere
):
    source = spoilt(name, tmp_path)
    place = "n01/7.JPEG')" if name == "folder" else "') row 1"
    wanted = place + " cannot be read as an image (image file is"
    with pytest.raises(UnreadableExample) as caught:
        source[BAD]
    assert wanted in str(caught.value)
    assert str(caught.value).endswith(": replace it")
    assert str(tmp_path) in str(caught.value)
    assert caught.value.index == BAD
    others = [index for index in range(small.COUNT) if index != BAD]
    np.testing.assert_array_equal(
        gather(source, np.array(others))["image"], IMAGES[others]
    )
    for view, index in ((source, BAD), (subset(source, [3, BAD, 1]), 1)):
        far = elsewhere.submit(small.read_elsewhere, view).exception()
        assert isinstance(far, UnreadableExample)
        assert (str(far), far.index) == (str(caught.value), index)
        with pytest.raises(UnreadableExample) as near:
            view[index]
        assert near.value.index == index


@all_formats
def test_files_that_went_are_unreadable_examples(tmp_path, name):
    source = made(name, tmp_path / "here")
    shutil.rmtree(tmp_path / "here")
    with pytest.raises(UnreadableExample, match="cannot be read as an image"):
        source[0]
    if name == "folder":
        assert source.identity() == source.identity()


@all_formats
def test_threads_share_a_source(tmp_path, name):
    source = made(name, tmp_path)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: source[n % 10]["image"], range(200)))
    np.testing.assert_array_equal(
        np.stack(found).reshape(20, 10, *small.SHAPE)[7], IMAGES
    )


@all_formats
def test_no_reader_writes_a_copy(tmp_path, name, own_cache):
    source = made(name, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    gather(source, np.arange(small.COUNT))
    into_memory([source])
    assert sorted(tmp_path.rglob("*")) == before
    assert not list(own_cache.rglob("*"))


@pytest.mark.parametrize("seconds", [3 * 1e-4, 3 * 1e-3])
@all_formats
def test_into_memory(tmp_path, name, monkeypatch, seconds):
    """By one thread where the first three show that threads would not help."""
    monkeypatch.setattr(streamed, "_PART", 3)
    times, pool = iter([5.0, 5.0 + seconds]), concurrent.futures.ThreadPoolExecutor
    monkeypatch.setattr(streamed.time, "perf_counter", lambda: next(times))
    workers = []

    def counted(most):
        workers.append(most)
        return pool(most)

    monkeypatch.setattr(streamed.concurrent.futures, "ThreadPoolExecutor", counted)
    done = []
    (source,) = into_memory([made(name, tmp_path)], lambda *call: done.append(call))
    assert isinstance(source, ArraySource)
    np.testing.assert_array_equal(source.tree["image"], IMAGES)
    np.testing.assert_array_equal(source.tree["label"], LABELS)
    assert done == [(3, 10), (6, 10), (9, 10), (10, 10)]
    assert workers == [1 if seconds < 1e-3 else None]


def test_running_out_of_memory_is_not_the_examples_fault(tmp_path, monkeypatch):
    def full(*arguments):
        raise MemoryError

    source = made("folder", tmp_path)
    monkeypatch.setattr("tanager.data.streamed.decode_image", full)
    with pytest.raises(MemoryError):
        source[0]
