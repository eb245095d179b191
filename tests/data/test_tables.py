import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS, SHAPE

import pages
from tanager.data import StreamedSource, gather, load
from tanager.data.tables import TableSource


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_both_formats_in_batches_of_any_size(tmp_path, stream, batch):
    small.write_arrow(tmp_path / "x.arrow", small.table(ENCODED, LABELS), stream, batch)
    source = TableSource([tmp_path / "x.arrow"], SHAPE)
    for index in (9, 0, 4):
        np.testing.assert_array_equal(source[index]["image"], IMAGES[index])


def test_rows_that_are_part_of_a_larger_table(tmp_path):
    rows = small.table(ENCODED, LABELS).slice(3, 5)
    small.write_arrow(tmp_path / "x.arrow", rows)
    source = TableSource([tmp_path / "x.arrow"], SHAPE)
    assert len(source) == 5
    np.testing.assert_array_equal(source[1]["image"], IMAGES[4])


def test_binary_images_are_resized_unless_exact(tmp_path):
    rows = small.table(ENCODED, LABELS)
    plain = rows.set_column(0, "image", [list(ENCODED)])
    small.write_arrow(tmp_path / "x.arrow", plain)
    files = [tmp_path / "x.arrow"]
    assert TableSource(files, (4, 4, 3))[0]["image"].shape == (4, 4, 3)
    with pytest.raises(ValueError, match="RGB image of 8 × 8, and must be RGB, 4 × 4"):
        TableSource(files, (4, 4, 3), exact=True)[0]


def parquet(path, part, rows):
    file = path / f"train-{part:05}-of-00003.parquet"
    pq.write_table(rows, file, row_group_size=4)
    return file


def three_parquets(path, metadata=None):
    rows = small.table(ENCODED, LABELS, metadata)
    return [parquet(path, part, rows) for part in range(3)]


@pytest.mark.parametrize("metadata", [{}, {b"huggingface": b"{"}])
def test_files_without_class_names(tmp_path, metadata):
    source = TableSource(three_parquets(tmp_path, metadata), SHAPE)
    assert source.class_names is None


def bad(change):
    return lambda file: pq.write_table(change(small.table(ENCODED, LABELS)), file)


def with_labels(values):
    return bad(lambda rows: rows.set_column(1, "label", pa.array(values)))


def damaged_row_group(file):
    content = bytearray(file.read_bytes())
    start = pq.read_metadata(file).row_group(1).column(0).data_page_offset
    content[start : start + 12] = bytes(12)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b"x" * 99), "is not a parquet file"),
        (lambda file: os.truncate(file, 800), "is not a parquet file"),
        (damaged_row_group, "is not a parquet file that can be read ("),
        (bad(lambda rows: rows.select(["image"])), "has no column 'label'"),
        (
            bad(lambda rows: rows.select(["label"])),
            "has no column 'image' or 'img' or",
        ),
        (bad(lambda rows: rows.slice(0, 0)), "has no rows"),
        (with_labels([0] * 9 + [None]), "row 9 has no label"),
        (with_labels([0.0] * 10), "column 'label' holds double: labels must be whole"),
        (
            bad(lambda rows: pa.table({"image": ["x"] * 10, "label": rows["label"]})),
            "column 'image' holds string: it must hold encoded images",
        ),
    ],
)
def test_bad_parquet_is_named(tmp_path, spoil, message):
    files = three_parquets(tmp_path)
    spoil(files[1])
    with pytest.raises(
        ValueError, match=re.escape(f"path (={str(files[1])!r}) {message}")
    ):
        TableSource(files, SHAPE)


@pytest.mark.parametrize("content", [None, b"\x89PNG", ENCODED[1][:-60]])
def test_rows_without_an_image(tmp_path, content):
    file = parquet(tmp_path, 0, small.table([ENCODED[0], content], [0, 1]))
    with pytest.raises(ValueError, match=r"row 1 cannot be read as an image \("):
        TableSource([file], SHAPE)[1]


def test_the_conversion_of_the_docs(tmp_path, monkeypatch):
    """To files of the same rows and class names, which are streamed."""
    (code,) = (
        block.code
        for block in pages.blocks(pages.ROOT / "docs" / "scale.md")
        if "to_arrow" in block.code
    )
    folder = tmp_path / "imagenet"
    folder.mkdir()
    for split in ("train", "validation"):
        pq.write_table(small.table(ENCODED, LABELS), folder / f"{split}.parquet")
    before = load("imagenet", folder, image_size=8)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    after = load("imagenet", tmp_path / "imagenet-arrow", image_size=8, stream=True)
    assert isinstance(after.train, StreamedSource)
    for half in ("train", "test"):
        one, two = (
            gather(getattr(each, half), np.arange(10)) for each in (before, after)
        )
        np.testing.assert_array_equal(one["image"], two["image"])
        np.testing.assert_array_equal(one["label"], two["label"])
    assert before.classes == after.classes
