import re

import pytest

from tanager.data.shards import find_shards


def touch(path, *names):
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()


@pytest.mark.parametrize(
    ("ending", "names"),
    [
        ("parquet", ["train.parquet"]),
        ("parquet", ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]),
        ("parquet", ["train/0000.parquet", "train/0001.parquet"]),
        ("arrow", ["imagenet-1k-train-00000-of-00001.arrow"]),
        ("arrow", ["train/data-00000-of-00001.arrow"]),
        ("array_record", ["imagenet2012-train.array_record-00000-of-00001"]),
    ],
)
def test_files_of_a_split(tmp_path, ending, names):
    touch(tmp_path, *names, "README.md", "test.parquet", "restrain.parquet")
    found = find_shards(tmp_path, "train", ending)
    assert [str(file.relative_to(tmp_path)) for file in found] == names
    assert find_shards(tmp_path, "validation", ending) == []


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_parts(tmp_path, missing):
    for part in {0, 1, 2} - {missing}:
        touch(tmp_path, f"x-train-{part:05}-of-00003.arrow")
    message = re.escape("has 2 of the 3 parts of train-*.arrow: get the missing parts")
    with pytest.raises(ValueError, match=message):
        find_shards(tmp_path, "train", "arrow")


@pytest.mark.parametrize(
    "other",
    ["train.parquet", "train-00000-of-00002.parquet", "x-train-00000-of-00001.parquet"],
)
def test_two_sets_of_files(tmp_path, other):
    touch(tmp_path, "train-00000-of-00001.parquet", other)
    with pytest.raises(ValueError, match="has more than one set of train files, such"):
        find_shards(tmp_path, "train", "parquet")
