import os
import re
import stat

import numpy as np
import pytest
import small_sources as small
from small_sources import ENCODED, LABELS, SHAPE

from tanager.data import UnreadableExample, tf_example
from tanager.data.array_record import ArrayRecordSource


def write(file, records=None):
    records = records or map(small.tf_record, LABELS.tolist(), ENCODED)
    small.write_array_record(file, records)
    return file


def test_labels_are_read_once_and_kept_in_private(tmp_path, own_cache, monkeypatch):
    source = ArrayRecordSource([write(tmp_path / "x")], SHAPE)
    np.testing.assert_array_equal(source.labels, LABELS)
    (kept,) = own_cache.glob("labels/*.npy")
    assert stat.S_IMODE(os.stat(kept.parent).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(kept).st_mode) == 0o600
    with monkeypatch.context() as patch:
        patch.setattr(tf_example, "parse", None)
        again = ArrayRecordSource([tmp_path / "x"], SHAPE)
        np.testing.assert_array_equal(again.labels, LABELS)
    kept.write_bytes(b"damaged")
    again = ArrayRecordSource([tmp_path / "x"], SHAPE)
    np.testing.assert_array_equal(again.labels, LABELS)


def test_a_damaged_record_is_named_and_the_others_are_read(tmp_path):
    noise = np.random.default_rng(1).integers(0, 256, (3, 80, 80, 3), np.uint8)
    records = [small.tf_record(n, small.png(noise[n])) for n in range(3)]
    file = write(tmp_path / "x", records)
    content = bytearray(file.read_bytes())
    place = content.index(records[1][200:220]) + 100
    content[place] ^= 255
    file.write_bytes(content)
    source = ArrayRecordSource([file], (80, 80, 3))
    with pytest.raises(UnreadableExample, match=r"record 1 cannot be read.*mismatch"):
        source[1]
    with pytest.raises(UnreadableExample, match="record 1 cannot be read"):
        _ = source.labels
    for index in (0, 2):
        np.testing.assert_array_equal(source[index]["image"], noise[index])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.unlink(), "cannot be read (No such file"),
        (lambda file: file.write_bytes(b""), "has no records, or is truncated"),
        (lambda file: file.write_bytes(b"x" * 9999), "has no records, or is truncated"),
        (lambda file: os.truncate(file, 60_000), "has no records, or is truncated"),
    ],
)
def test_bad_files_are_named(tmp_path, spoil, message):
    spoil(file := write(tmp_path / "x"))
    expected = f"path (={str(file)!r}) {message}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        ArrayRecordSource([file], SHAPE)


def test_labels_are_within_the_classes(tmp_path):
    source = ArrayRecordSource([write(tmp_path / "x")], SHAPE, classes=2)
    message = "record 9 cannot be read as an image .its label is 2, and must be from 0"
    with pytest.raises(UnreadableExample, match=message):
        source[9]


def test_examples_are_parsed():
    assert tf_example.parse(small.tf_record(300, b"abc")) == (b"abc", 300)
    slim = small.tf_record(1000, b"abc", b"image/class/label", b"image/encoded")
    assert tf_example.parse(slim) == (b"abc", 999)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"\xff\xff\xff", "is not a tf.train.Example"),
        (b"", "has no feature 'image' or 'image/encoded': it has []"),
        (
            small.tf_record(1, b"x", label_name=b"class"),
            "has no feature 'label' or 'image/class/label': it has ['class', 'file_na",
        ),
        (
            small.tf_record(1, b"x", label_name=b"image", image_name=b"label"),
            "has 0 images and 0 labels",
        ),
    ],
)
def test_other_records_are_refused(record, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tf_example.parse(record)
