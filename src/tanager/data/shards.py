"""The files of one split: one file, or numbered parts that must all be there."""

import re
from pathlib import Path

from tanager.data.formats import refuse_file


_NUMBERS = re.compile(r"-(\d{5})-of-(\d{5})")


def find_shards(folder: Path, split: str, ending: str) -> list[Path]:
    """Return the files of a split, in order; none if there are none.

    They are ``SPLIT.ENDING`` or ``SPLIT-00000-of-00008.ENDING`` and so on, with or
    without a prefix (``NAME-SPLIT.ENDING``), numbers before the ending or after it (as
    TFDS has them); or else all files ``*.ENDING`` in a folder named SPLIT.

    Raises:
        ValueError: numbered parts are missing, or more than one set of files fits.
    """
    wanted = f"{split}.{ending}"
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        name = _NUMBERS.sub("", file.name)
        if name == wanted or name.endswith(f"-{wanted}"):
            found.setdefault(_set_of(file), []).append(file)
    if not found and (folder / split).is_dir():
        folder /= split
        for file in sorted(folder.glob(f"*.{ending}")):
            key = _set_of(file) if _NUMBERS.search(file.name) else ""
            found.setdefault(key, []).append(file)
    if len(found) > 1:
        first, second = list(found.values())[:2]
        refuse_file(
            folder,
            f"has more than one set of {split} files, such as {first[0].name} and "
            f"{second[0].name}",
            "leave only one of them there",
        )
    files = next(iter(found.values()), [])
    numbers = [match for file in files if (match := _NUMBERS.search(file.name))]
    if numbers:
        parts = int(numbers[0][2])
        if [int(match[1]) for match in numbers] != list(range(parts)):
            refuse_file(
                folder,
                f"has {len(numbers)} of the {parts} parts of {split}-*.{ending}",
                "get the missing parts",
            )
    return files


def _set_of(file: Path) -> str:
    return _NUMBERS.sub(lambda match: f"-of-{match[2]}", file.name)
