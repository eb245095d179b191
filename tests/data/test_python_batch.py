"""Pickles of CIFAR as Python 2 wrote them, byte by byte, and pickles that attack."""

import pickle
import re
import struct
from typing import Any

import numpy as np
import pytest

from tanager.data import python_batch
from tanager.data.python_batch import parse, read_python_batch


SHAPE = (2, 2, 3)
ROWS = np.arange(36, dtype=np.uint8).reshape(3, 12)
LABELS = [0, 300, 70_000]
OLD, NEW = b"numpy.core.multiarray", b"numpy._core.multiarray"


def text(content):
    """SHORT_BINSTRING, or BINSTRING where it is long."""
    if len(content) < 256:
        return b"U" + bytes([len(content)]) + content
    return b"T" + struct.pack("<i", len(content)) + content


def number(value):
    if value < 256:
        return b"K" + bytes([value])
    if value < 65536:
        return b"M" + struct.pack("<H", value)
    return b"J" + struct.pack("<i", value)


def array(rows, module=OLD, dtype=b"u1", shape=None):
    """What NumPy 1 and Python 2 wrote of an array, as in the original files."""
    height, width = shape or rows.shape
    return (
        b"c" + module + b"\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85q\x09"
        b"U\x01b\x87Rq\x0a(K\x01" + number(height) + number(width) + b"\x86"
        b"cnumpy\ndtype\nq\x0b" + text(dtype) + b"K\x00K\x01\x87Rq\x0c"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        + text(rows.tobytes())
        + b"tb"
    )


def labels_of(labels):
    return b"]q\x05(" + b"".join(map(number, labels)) + b"e"


def cifar10(rows=None, labels=None):
    """The order of data_batch_1: batch_label, labels, data, filenames."""
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
        + b"U\x06labelsq\x04"
        + (labels_of(LABELS) if labels is None else labels)
        + b"U\x04dataq\x06"
        + (array(ROWS) if rows is None else rows)
        + b"U\x09filenamesq\x0d]q\x0e(U\x05a.pngr\x00\x01\x00\x00U\x05b.pngq\x0feu."
    )


def cifar100():
    """The order of CIFAR-100's train: filenames first, two kinds of labels."""
    return (
        b"\x80\x02}q\x01(U\tfilenamesq\x02]q\x03U\x05a.pngq\x04aU\x0bbatch_labelq\x05"
        b"U\x19training batch 1 of 1 (x)q\x06U\x0bfine_labelsq\x07"
        + labels_of([1, 2, 3])
        + b"U\rcoarse_labelsq\x09"
        + labels_of([0, 0, 1])
        + b"U\x04dataq\x0a"
        + array(ROWS)
        + b"u."
    )


def read(path, content, key="labels", classes=100_000):
    file = path / "data_batch_1"
    file.write_bytes(content)
    return read_python_batch(file, key, SHAPE, classes)


def planes(rows=ROWS):
    return rows.reshape(-1, 3, 2, 2).transpose(0, 2, 3, 1)


def python_3(protocol):
    return pickle.dumps({b"data": ROWS, b"labels": LABELS}, protocol)


@pytest.mark.parametrize(
    "content",
    [cifar10(), cifar10(array(ROWS, NEW)), python_3(3), python_3(4)],
    ids=["original", "numpy 2", "protocol 3", "protocol 4"],
)
def test_batches_as_they_are_distributed(tmp_path, content):
    images, labels = read(tmp_path, content)
    np.testing.assert_array_equal(images, planes())
    np.testing.assert_array_equal(labels, LABELS)


def test_what_is_written_here_is_what_python_reads():
    for content in (cifar10(), cifar100()):
        found = pickle.loads(content, encoding="bytes")
        np.testing.assert_array_equal(found[b"data"], ROWS)
        assert {key.decode() for key in found} == set(parse(content))


def test_cifar_100(tmp_path):
    images, labels = read(tmp_path, cifar100(), "fine_labels")
    np.testing.assert_array_equal(images, planes())
    np.testing.assert_array_equal(labels, [1, 2, 3])


def test_more_bytes_than_a_short_text_holds(tmp_path):
    rows = np.arange(3000, dtype=np.uint8).reshape(250, 12)
    images, _ = read(tmp_path, cifar10(array(rows), labels_of([7] * 250)))
    np.testing.assert_array_equal(images, planes(rows))


class Calls:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


RECONSTRUCT = np.empty(0).__reduce__()[0]
OF_OBJECTS = Calls(np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 63))


def pointing(address, dtype: Any = OF_OBJECTS):
    """An array of pointers, which NumPy would follow: /work's pickle_min.py."""
    state = (1, (1,), dtype, False, struct.pack("<Q", address))
    return Calls(RECONSTRUCT, (np.ndarray, (0,), b"b"), state)


@pytest.mark.parametrize(
    "value",
    [
        pointing(0x4141414141414141),
        pointing(0, np.dtype(np.float64)),
        pointing(0, np.dtype([("a", "O")])),
        Calls(np.dtype, ("O8",)),
        Calls(np.ndarray, ((1 << 40,), "u1")),
        Calls(RECONSTRUCT, (np.ndarray, (1 << 40,), b"b")),
        Calls(RECONSTRUCT, (dict, (0,), b"b")),
        Calls(np.ndarray, (0,), (1, (1 << 60,), np.dtype("u1"), False, b"")),
        Calls(eval, ("1",)),
        Calls(pickle.loads, (b"N.",)),
        np.array([None]),
        np.zeros(2),
        np.asfortranarray(np.zeros((2, 2), np.uint8)),
    ],
)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_attacks_are_refused(tmp_path, value, protocol):
    content = pickle.dumps({"data": value, "labels": LABELS}, protocol)
    named = r"data_batch_1'\) cannot be read as a batch of arrays \("
    with pytest.raises(ValueError, match=named):
        read(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (cifar10(array(ROWS, dtype=b"O8")), "other numbers than bytes"),
        (cifar10(array(ROWS, shape=(2**30, 12))), "an array that is damaged"),
        (cifar10(array(ROWS)[:-1]), "it is damaged|it sets items"),
        (cifar10(b"cos\nsystem\nU\x02ls\x85R"), r"asks for os\.system, and only"),
        (cifar10(b"c" + bytes(200)), "a name does not end"),
        (cifar10(b"cposix\n\x1b[2J\n"), r"asks for posix\.�\[2J"),
        (b"\x80\x02}q\x01U\x04data" + b"T\xff\xff\xff\x7f.", "it is cut short"),
        (b"\x80\x02}q\x01U\x04data" + b"T\xff\xff\xff\xff.", "it is cut short"),
        (b"h\x07.", "what it never kept"),
        (b".", "a value is missing"),
        (b"(.", "a value is missing"),
        (b"(0.", "byte 1 is b'0', which no batch"),
        (b"t.", "a mark is missing"),
        (b"}]N" + b"s.", "a key that is no text"),
        (b"]" * 100_000 + b".", "holds list, and must"),
        (b"}U\x01a" + b"]" * 50_000 + b"a" * 49_999 + b"s.", None),
        (b"]" * 4_000_001, "more than 4,000,000 instructions"),
    ],
)
def test_damage_is_refused(tmp_path, content, message):
    if message is None:
        message = r"has no 'data': it has \['a'\]"
    with pytest.raises(ValueError, match=message) as refused:
        read(tmp_path, content)
    assert "data_batch_1" in str(refused.value)


def test_a_list_that_holds_itself_is_refused(tmp_path):
    itself = b"]q\x05h\x05a"
    with pytest.raises(ValueError, match="no list of integers"):
        read(tmp_path, cifar10(labels=itself))


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(python_batch, "LARGEST", 50)
    with pytest.raises(ValueError, match=re.escape("has more than 50 bytes")):
        read(tmp_path, cifar10())


def test_no_file_of_the_package_unpickles():
    source = python_batch.__file__.rpartition("/data/")[0]
    from pathlib import Path

    for file in Path(source).rglob("*.py"):
        words = file.read_text(encoding="utf-8")
        assert not re.search(
            r"^\s*(import|from) (c?pickle|dill|marshal)\b", words, re.M
        )
        assert "allow_pickle=True" not in words
