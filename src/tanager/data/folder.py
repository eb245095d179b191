"""A folder of images: one sub-folder per class.

Either ``train/<class>/*`` and ``test/<class>/*``, or ``<class>/*`` alone, which is
split here: within each class the files are put in order of a hash of their relative
path, and every fifth is a test example. The split depends on nothing but the paths. It
counts as public, and the guarantee is about the training examples that it leaves. A new
file can move another one across the split: where that matters, make the two folders.
"""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

from tanager.data.formats import Arrays, Report, decode_images, refuse_file


_SUFFIXES = (".png", ".jpg", ".jpeg")
_GREY = ("1", "L")
_COLOUR = ("RGB", "P")
_EVERY = 5  # one in five is a test example


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a folder holds, before any image is decoded.

    Attributes:
        classes: the class names, sorted.
        train: (file, label) of every training example.
        test: (file, label) of every test example.
        shape: (H, W, C) that the images are decoded to.
        resize: whether they are resized to it.
    """

    classes: tuple[str, ...]
    train: list[tuple[Path, int]]
    test: list[tuple[Path, int]]
    shape: tuple[int, int, int]
    resize: bool


def list_folder(path: Path, image_size: int | None) -> Listing:
    """Find the classes and files of a folder and check every file's size and mode.

    Files are taken by their ending: png, jpg, jpeg. If all are grey the images have
    one channel, otherwise three; grey and palette images then become RGB.

    Args:
        path: the folder.
        image_size: resize to this many pixels each way (the shorter side is scaled,
            the middle is kept); None where all images have one size already.

    Raises:
        ValueError: no classes, a class without images, test classes that differ from
            the training classes, images that differ in size, an image that cannot be
            read or has an alpha channel or other mode. The message names the file.
    """
    halves = [(path / half).is_dir() for half in ("train", "test")]
    if any(halves) and not all(halves):
        present, absent = ("train", "test") if halves[0] else ("test", "train")
        refuse_file(
            path,
            f"has a folder {present!r} but none named {absent!r}",
            "it needs both, or the class folders alone",
        )
    if all(halves):
        train_classes = _class_files(path / "train")
        test_classes = _class_files(path / "test")
        if odd := sorted(train_classes.keys() ^ test_classes.keys()):
            refuse_file(
                path, f"has class {odd[0]!r} in only one of train and test", "add it"
            )
    else:
        train_classes, test_classes = _split(path, _class_files(path))
    train, test = _labelled(train_classes), _labelled(test_classes)
    shape = _common_shape([file for file, _ in train + test], image_size)
    return Listing(tuple(train_classes), train, test, shape, image_size is not None)


def read_folder(listing: Listing, split: str, report: Report) -> Arrays:
    """Decode one split of a folder, ``"train"`` or ``"test"``.

    Raises:
        ValueError: an image cannot be decoded. The message names the file.
    """
    entries = listing.train if split == "train" else listing.test

    def decode(position: int) -> np.ndarray:
        return _decode_file(entries[position][0], listing.shape, listing.resize)

    images = decode_images(len(entries), decode, listing.shape, report)
    return images, np.array([label for _, label in entries], np.int32)


def _class_files(folder: Path) -> dict[str, list[Path]]:
    names = sorted(
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    )
    if not names:
        refuse_file(folder, "has no class folders", "make one folder of images each")
    classes = {}
    for name in names:
        classes[name] = sorted(
            file
            for file in (folder / name).iterdir()
            if file.suffix.lower() in _SUFFIXES and not file.name.startswith(".")
        )
        if not classes[name]:
            refuse_file(
                folder / name,
                "is a class without images",
                f"put {', '.join(_SUFFIXES)} files in it, or remove it",
            )
    return classes


def _split(
    path: Path, classes: dict[str, list[Path]]
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    def order(file: Path) -> bytes:
        relative = file.relative_to(path).as_posix()
        return hashlib.blake2b(
            relative.encode(errors="surrogateescape"), digest_size=16
        ).digest()

    train, test = {}, {}
    for name, files in classes.items():
        if len(files) < 2:
            refuse_file(
                path / name,
                "is a class of one image, which cannot be split",
                "add images, or make train and test folders",
            )
        test[name] = sorted(sorted(files, key=order)[::_EVERY])
        train[name] = sorted(set(files) - set(test[name]))
    return train, test


def _labelled(classes: dict[str, list[Path]]) -> list[tuple[Path, int]]:
    return [
        (file, label) for label, files in enumerate(classes.values()) for file in files
    ]


def _common_shape(files: list[Path], image_size: int | None) -> tuple[int, int, int]:
    from PIL import Image

    sizes: dict[tuple[int, int], Path] = {}
    channels = 1
    for file in files:
        try:
            with Image.open(file) as image:
                mode, (width, height) = image.mode, image.size
                alpha = "transparency" in image.info
        except Exception as error:  # Pillow's readers raise nearly anything
            refuse_file(file, f"cannot be read as an image ({error})", "replace it")
        if mode not in _GREY + _COLOUR or alpha:
            refuse_file(
                file,
                f"has mode {mode}{' with transparency' if alpha else ''}",
                "convert it to RGB or grey, 8 bits per channel",
            )
        if mode in _COLOUR:
            channels = 3
        sizes.setdefault((height, width), file)
    if image_size is not None:
        return image_size, image_size, channels
    if len(sizes) > 1:
        (first, other), (like, file) = list(sizes)[:2], list(sizes.values())[:2]
        refuse_file(
            file,
            f"is {other[0]} × {other[1]} and {like.name} is {first[0]} × {first[1]}",
            f"give image_size={min(min(size) for size in sizes)} to resize them all",
        )
    (size,) = sizes
    return *size, channels


def _decode_file(file: Path, shape: tuple[int, int, int], resize: bool) -> np.ndarray:
    from PIL import Image, ImageOps

    height, width, channels = shape
    try:
        with Image.open(file) as image:
            picture = image.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's decoders raise nearly anything
        refuse_file(file, f"cannot be decoded ({error})", "replace it")
    if resize and picture.size != (width, height):
        method = Image.Resampling.BICUBIC
        picture = ImageOps.fit(picture, (width, height), method=method)
    return np.asarray(picture).reshape(shape)
