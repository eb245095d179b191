import os
import re
import stat

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS, SHAPE

from tanager.data import conversion, gather


def parquet_files(path, parts=3, **options):
    files = []
    for part in range(parts):
        file = path / f"train-{part:05}-of-{parts:05}.parquet"
        pq.write_table(small.table(ENCODED, LABELS, **options), file, row_group_size=4)
        files.append(file)
    return files


def opened(files, progress=None):
    return conversion.open_parquet([files], SHAPE, ("label",), None, True, progress)[0]


def converted_files(cache):
    return sorted((cache / "converted").glob("*/*.arrow"))


def test_copies_are_made_once_and_are_private(tmp_path, own_cache, monkeypatch):
    files, calls = parquet_files(tmp_path), []
    opened(files, lambda *call: calls.append(call))
    assert calls == [(done, 30) for done in (4, 8, 10, 14, 18, 20, 24, 28, 30)]
    copies = converted_files(own_cache)
    assert len(copies) == 3
    (folder,) = {copy.parent for copy in copies}
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    for copy in copies:
        assert stat.S_IMODE(os.stat(copy).st_mode) == 0o600
    monkeypatch.setattr(conversion, "_convert", None)
    calls.clear()
    source = opened(files, lambda *call: calls.append(call))
    assert calls == [(10, 30), (20, 30), (30, 30)]
    batch = gather(source, np.arange(30))
    np.testing.assert_array_equal(batch["image"], np.concatenate([IMAGES] * 3))


def test_a_conversion_cut_off_goes_on(tmp_path, own_cache, monkeypatch):
    files = parquet_files(tmp_path)

    def cut(done, total):
        if done > 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(files, cut)
    (first,) = converted_files(own_cache)
    assert first.name == "train-00000-of-00003.arrow"
    assert first.with_name("train-00001-of-00003.part").exists()
    before, made = os.stat(first).st_mtime_ns, []
    convert = conversion._convert
    monkeypatch.setattr(
        conversion, "_convert", lambda *a: (made.append(a[0].name), convert(*a))
    )
    source = opened(files)
    assert made == [file.name for file in files[1:]]
    assert os.stat(first).st_mtime_ns == before
    np.testing.assert_array_equal(source[17]["image"], IMAGES[7])
    assert not list(first.parent.glob("*.part"))


def test_other_files_get_other_copies(tmp_path, own_cache):
    files = parquet_files(tmp_path, 1)
    opened(files)
    pq.write_table(small.table(ENCODED[::-1], LABELS[::-1]), files[0])
    np.testing.assert_array_equal(opened(files)[0]["image"], IMAGES[-1])
    assert len(converted_files(own_cache)) == 2


def test_class_names_come_along(tmp_path):
    metadata = (
        b'{"info": {"features": {"label": {"_type": "ClassLabel", '
        b'"names": ["ant", "bee", "cow"]}}}}'
    )
    files = parquet_files(tmp_path, metadata={b"huggingface": metadata})
    assert opened(files).class_names == ("ant", "bee", "cow")


@pytest.mark.parametrize("metadata", [{}, {b"huggingface": b"{"}])
def test_files_without_class_names(tmp_path, metadata):
    assert opened(parquet_files(tmp_path, metadata=metadata)).class_names is None


def bad(change):
    return lambda file: pq.write_table(change(small.table(ENCODED, LABELS)), file)


def with_labels(values):
    return bad(lambda rows: rows.set_column(1, "label", pa.array(values)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: file.write_bytes(b"x" * 99), "is not a parquet file"),
        (lambda file: os.truncate(file, 800), "is not a parquet file"),
        (bad(lambda rows: rows.select(["image"])), "has no column 'label'"),
        (bad(lambda rows: rows.select(["label"])), "has no column 'img' or 'image'"),
        (bad(lambda rows: rows.slice(0, 0)), "has no rows"),
        (with_labels([0] * 9 + [None]), "row 9 has no label"),
        (with_labels([0] * 9 + [-1]), "row 9 has label -1"),
        (with_labels(["x"] * 10), "column 'label' holds string: labels must be int"),
        (
            bad(lambda rows: pa.table({"image": ["x"] * 10, "label": rows["label"]})),
            "column 'image' holds string: it must hold encoded images",
        ),
    ],
)
def test_bad_files_are_named(tmp_path, spoil, message):
    files = parquet_files(tmp_path)
    spoil(files[1])
    with pytest.raises(
        ValueError, match=re.escape(f"path (={str(files[1])!r}) {message}")
    ):
        opened(files)


def test_a_damaged_row_group_is_named(tmp_path):
    files = parquet_files(tmp_path, 1)
    content = bytearray(files[0].read_bytes())
    group = pq.read_metadata(files[0]).row_group(1).column(0)
    start = group.data_page_offset
    content[start : start + 12] = bytes(12)
    files[0].write_bytes(content)
    with pytest.raises(ValueError, match="row group 1 cannot be read"):
        opened(files)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="or copied to the cache"):
        opened(parquet_files(tmp_path))


def test_rows_without_bytes(tmp_path):
    file = tmp_path / "train.parquet"
    pq.write_table(small.table([ENCODED[0], None], [0, 1]), file)
    with pytest.raises(ValueError, match=r"row 1 cannot be read as an image \(it has"):
        opened([file])[1]
