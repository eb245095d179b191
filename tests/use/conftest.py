import numpy as np
import pytest
from PIL import Image

from tanager.cli import main


MODES = ("RGB", "L", "RGBA", "P")


def write_images(folder, count, seed):
    """Images of mixed sizes and modes, one folder for each of two classes."""
    draw = np.random.default_rng(seed)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            size = (int(draw.integers(9, 40)), int(draw.integers(9, 40)), 3)
            image = Image.fromarray(draw.integers(0, 256, size, np.uint8))
            image = image.convert(MODES[number % len(MODES)])
            image.save(folder / name / f"{number}.png")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_images(folder / "train", 10, 0)
    write_images(folder / "test", 4, 1)
    return folder


@pytest.fixture(scope="session")
def run(photos, tmp_path_factory):
    """A run whose images are read at 12 pixels and seen at 8, by views of 10."""
    folder = tmp_path_factory.mktemp("runs") / "1"
    words = "train folder --image-size 12 --crop-size 10 --augmentation crop-flip"
    words += " --augmentation-multiplicity 1 --model linear --steps 2 --batch-size 10"
    words += " --ema-decay 0.9 --delta 0.01 --account none"
    places = ["--data", str(photos), "--out", str(folder)]
    assert main([*words.split(), *places]) == 0
    return folder
