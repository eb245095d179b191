import os
import re

import numpy as np
import pytest
import small_sources as small
from small_sources import ENCODED, IMAGES, LABELS, SHAPE

from tanager.data.arrow import ArrowSource


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_both_formats_in_batches_of_any_size(tmp_path, stream, batch):
    small.write_arrow(tmp_path / "x.arrow", small.table(ENCODED, LABELS), stream, batch)
    source = ArrowSource([tmp_path / "x.arrow"], SHAPE)
    for index in (9, 0, 4):
        np.testing.assert_array_equal(source[index]["image"], IMAGES[index])


def test_rows_that_are_part_of_a_larger_table(tmp_path):
    rows = small.table(ENCODED, LABELS).slice(3, 5)
    small.write_arrow(tmp_path / "x.arrow", rows)
    source = ArrowSource([tmp_path / "x.arrow"], SHAPE)
    assert len(source) == 5
    np.testing.assert_array_equal(source[1]["image"], IMAGES[4])


def test_binary_images_are_resized_unless_exact(tmp_path):
    rows = small.table(ENCODED, LABELS)
    plain = rows.set_column(0, "image", [list(ENCODED)])
    small.write_arrow(tmp_path / "x.arrow", plain)
    files = [tmp_path / "x.arrow"]
    assert ArrowSource(files, (4, 4, 3))[0]["image"].shape == (4, 4, 3)
    with pytest.raises(ValueError, match="RGB image of 8 × 8, and must be RGB, 4 × 4"):
        ArrowSource(files, (4, 4, 3), exact=True)[0]


@pytest.mark.parametrize("stream", [True, False])
def test_truncated_files_are_named(tmp_path, stream):
    file = tmp_path / "x.arrow"
    small.write_arrow(file, small.table(ENCODED, LABELS), stream)
    os.truncate(file, os.path.getsize(file) // 2)
    message = f"path (={str(file)!r}) is not an Arrow file that can be read"
    with pytest.raises(ValueError, match=re.escape(message)):
        ArrowSource([file], SHAPE)


def test_labels_are_within_the_classes(tmp_path):
    small.write_arrow(tmp_path / "x.arrow", small.table(ENCODED, LABELS))
    with pytest.raises(ValueError, match="row 8 has label 2: labels must be from 0 to"):
        ArrowSource([tmp_path / "x.arrow"], SHAPE, classes=2)
