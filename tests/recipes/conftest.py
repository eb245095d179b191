import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def images(tmp_path):
    """Bright and dark images of 16×16 pixels, 20 of each for training, 4 to test."""
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for name, level in (("bright", 200), ("dark", 60)):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.normal(level, 20, (16, 16, 3)).clip(0, 255)
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(folder / f"{number}.png")
    return tmp_path / "images"
