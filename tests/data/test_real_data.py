"""The real files, where they are at hand (../shared/data); skipped elsewhere."""

from pathlib import Path

import numpy as np
import pytest

from tanager.data import gather, load


SHARED = Path(__file__).parents[3] / "shared" / "data"


def needs(name):
    return pytest.mark.skipif(
        not (SHARED / name).is_dir(), reason=f"no real {name} in {SHARED}"
    )


def moments(pixels):
    """Mean and standard deviation on the 0..1 scale, from the exact histogram."""
    counts = sum(np.bincount(image.ravel(), minlength=256) for image in pixels)
    levels, weights = np.arange(256) / 255, counts / pixels.size
    mean = np.sum(weights * levels)
    return mean, np.sqrt(np.sum(weights * (levels - mean) ** 2))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "test", "per_class"),
    [
        pytest.param("cifar10", 50_000, 10_000, [5000] * 10, marks=needs("cifar10")),
        pytest.param(
            "mnist",
            60_000,
            10_000,
            # LeCun, Cortes, Burges: the training labels of MNIST.
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            marks=needs("mnist"),
        ),
    ],
)
def test_real_files(name, train, test, per_class):
    dataset = load(name, SHARED / name)
    assert (len(dataset.train), len(dataset.test)) == (train, test)
    arrays = gather(dataset.train, np.arange(train))
    pixels = arrays["image"]
    assert pixels.shape == (train, *dataset.image_shape)
    np.testing.assert_array_equal(np.bincount(arrays["label"]), per_class)
    for channel, (mean, std) in enumerate(zip(dataset.mean, dataset.std, strict=True)):
        found_mean, found_std = moments(pixels[..., channel])
        assert abs(found_mean - mean) < 1e-4
        assert abs(found_std - std) < 1e-4
