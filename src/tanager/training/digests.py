"""Find a folder that was damaged after it was written: a digest of all its files."""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tanager import _processor
from tanager._files import write_json
from tanager._reading import MALFORMED


_NAME = "digest.json"
_BLOCK = 1 << 24  # bytes digested at once


def seal(folder: Path, label: str) -> None:
    """Write the digest of a folder's files beside them, and force it to the disk.

    Args:
        folder: complete; what is added or changed later damages it.
        label: what the folder is, such as the step of a checkpoint.
    """
    write_json(folder / _NAME, {"label": label, "blake2b": _digest(folder)})


def is_sound(folder: Path, label: str) -> bool:
    """Return whether a folder holds what it held when it was sealed with this label."""
    try:
        sealed = json.loads((folder / _NAME).read_bytes())
        return sealed == {"label": label, "blake2b": _digest(folder)}
    except (OSError, *MALFORMED):
        return False


def _digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if path != folder / _NAME]
    names = [
        [path.relative_to(folder).as_posix(), path.stat().st_size] for path in files
    ]
    total = hashlib.blake2b(json.dumps(names).encode())
    with ThreadPoolExecutor(_processor.cores()) as threads:
        for block in threads.map(_block, *zip(*_blocks(files), strict=True)):
            total.update(block)
    return total.hexdigest()


def _blocks(files: list[Path]) -> Iterator[tuple[Path, int]]:
    for path in files:
        for start in range(0, max(1, path.stat().st_size), _BLOCK):
            yield path, start


def _block(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(_BLOCK)).digest()
