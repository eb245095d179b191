"""Find the files of a split by their names: one, or several parts of one set."""

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tanager._reading import read_json, reading, refuse_file
from tanager._text import clean
from tanager.data.layout import Record, counted, ending, looked, walked


# The Hub adds a hash of each part: train-00000-of-00001-0e4da7e64a4b9d5c.parquet
_NUMBERS = re.compile(r"-(\d{5})-of-(\d{5})(-[0-9a-f]{6,40})?(?=\.)")
ENDINGS = ("parquet", "arrow", "feather", "ipc")
"""Of files that are tables of images."""
_STATE = "state.json"
"""What `save_to_disk` of Hugging Face's `datasets` writes beside its files."""


def find_shards(folder: Path, split: str, ending: str) -> list[Path]:
    """Return the files of a split, in order; an empty list if there are none.

    They are ``SPLIT.ENDING`` or ``SPLIT-00000-of-00008.ENDING`` and so on, with or
    without a prefix (``NAME-SPLIT.ENDING``); or else all files of a folder named SPLIT,
    see `all_shards`. Lower and upper case are alike. Missing parts and a second set of
    files are refused.
    """
    wanted = f"{split}.{ending}"
    # No path for each name, and none is sorted: the folder may hold a million images.
    files, below = [], []
    for found in os.listdir(folder):
        name = _NUMBERS.sub("", found).lower() if found.endswith(ending) else ""
        if name == wanted or name.endswith(f"-{wanted}"):
            files.append(folder / found)
        elif found.lower() == split and (folder / found).is_dir():
            below.append(folder / found)
    if files:
        return _one_set(folder, split, sorted(files), _set_of)
    return all_shards(min(below), ending) if below else []


def all_shards(folder: Path, ending: str) -> list[Path]:
    """Return all files of an ending in a folder, or those that its state.json names."""
    state = folder / _STATE
    if state.is_file():
        with reading(state, "names no files"):
            names = [each["filename"] for each in read_json(state)["_data_files"]]
        # Others are what `map` and `shuffle` left there.
        files = [folder / Path(str(name)).name for name in names]
        if len({*files}) < len(files):
            refuse_file(state, "names a file twice", "each of its images would be two")
        return [file for file in files if file.suffix == f".{ending}"]
    files = sorted(folder.glob(f"*.{ending}"))
    return _one_set(folder, folder.name, files, _numbered_set)


def tabled(folders: Sequence[Path]) -> list[Path]:
    """Return folders, and after them the one in the last that has tables to train on.

    As on the Hub, that is ``data/train*`` or ``NAME/train/*``, with others beside it.
    """
    below = [folders[-1] / name for name in looked(folders[-1])[2]]
    # No other folder is listed: class folders may hold a million files.
    likely = [f for f in below if f.name == "data" or (f / "train").is_dir()]
    found = [
        f for f in likely if any(find_shards(f, "train", kind) for kind in ENDINGS)
    ]
    return [*folders, *(found if len(found) == 1 else ())]


def note_unread(folder: Path, used: Collection[Path], record: Record) -> None:
    """Put on record that a folder of tables has images in other files than `used`."""
    others = []
    for place, images, files in walked(folder):
        tables = [name for name in files if ending(name)[1:] in ENDINGS]
        found = [place / name for name in (*images, *tables)]
        left_over = (place / _STATE).is_file() and {*found} & {*used}
        others += [] if left_over else [each for each in found if each not in used]
    if others:
        files = counted(len(others), "file")
        name = clean(str(min(others).relative_to(folder)))
        record.notes.append(f"not read: {files} of images, such as {name}")


def _one_set(
    folder: Path, split: str, files: Sequence[Path], key: Callable[[Path], str]
) -> list[Path]:
    others = [file for file in files if key(file) != key(files[0])]
    numbers = [match for file in files if (match := _NUMBERS.search(file.name))]
    if others or len({match[1] for match in numbers}) < len(numbers):
        first, second = files[0].name, (others or files[1:])[0].name
        rule = f"has more than one set of {split} files, such as {first} and {second}"
        refuse_file(folder, rule, "move all but one of them elsewhere")
    if numbers:
        parts = int(numbers[0][2])
        if [int(match[1]) for match in numbers] != list(range(parts)):
            found = f"has {len(numbers)} of the {parts} parts of {split}-*"
            refuse_file(folder, found + files[0].suffix, "get the missing parts")
    return list(files)


def _set_of(file: Path) -> str:
    return _NUMBERS.sub(lambda match: f"-of-{match[2]}", file.name)


def _numbered_set(file: Path) -> str:
    return _set_of(file) if _NUMBERS.search(file.name) else ""
