import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

from tanager.data.preprocessing import INTERPOLATIONS, Preprocessing, resize
from tanager.models.foreign import preprocessing


REFERENCES = Path(__file__).parents[1] / "models/references/preprocessing.json"
RECORDS = json.loads(REFERENCES.read_text())["records"]
HALF = Preprocessing(mean=(0.5,) * 3, std=(0.25,) * 3)


def photo(name):
    return load_sample_image(name)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((32, 32), (128, 128)),
        ((300, 451), (213, 320)),
        ((7, 9), (3, 4)),
        ((9, 5), (9, 7)),
    ],
)
def test_images_are_resized_as_pillow_resizes_them(before, after, interpolation):
    image = np.random.default_rng(0).integers(0, 256, (*before, 3), np.uint8)
    number = {"lanczos": 1, "bilinear": 2, "bicubic": 3}[interpolation]
    size = after[::-1]
    expected = np.asarray(Image.fromarray(image).resize(size, Image.Resampling(number)))
    found = jax.jit(lambda image: resize(image, after, interpolation))(image)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "record", RECORDS, ids=lambda each: "x".join(map(str, each["shape"]))
)
def test_photos_become_what_other_libraries_make_of_them(record):
    made = preprocessing.read(record["config"])
    assert made is not None
    image = photo(record["photo"])
    assert list(made.seen(image.shape)) == record["shape"]
    pixels = np.asarray(jax.jit(made)(image))
    places = np.random.default_rng(0).integers(0, pixels.size, 24)
    np.testing.assert_allclose(pixels.ravel()[places], record["samples"], atol=1e-5)


def test_the_record_and_the_object_are_one():
    made = dataclasses.replace(HALF, size=(20, 30), crop=0.9, squash=True)
    run = json.loads(json.dumps({"preprocessing": made.to_json(), "model": "x"}))
    assert preprocessing.read(run) == preprocessing.read({"tanager": run}) == made
    assert preprocessing.read({"preprocessing": None}) is None


def test_grey_images_are_repeated_for_a_network_of_colours():
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    pixels = np.asarray(HALF(jnp.asarray(grey)))
    assert pixels.shape == (8, 8, 3)
    assert (pixels[..., :1] == pixels).all()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 2), np.uint8), r"must be \(height, width, 3\)"),
        (np.zeros((8, 8, 3), np.float32), "must be uint8"),
    ],
)
def test_what_is_no_image_is_refused(image, message):
    with pytest.raises(ValueError, match=message):
        HALF(image)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop": 0.0}, "crop"),
        ({"crop": 1.5}, "crop"),
        ({"interpolation": "nearest"}, "bicubic"),
        ({"size": (0, 4)}, "height"),
        ({"crop": 0.5}, r"crop \(=0.5\) needs a size: give size=\(height, width\), or"),
        ({"squash": True}, "squash .*needs a size"),
        ({"std": (0.5, 0.0, 0.5)}, "std"),
    ],
)
def test_impossible_preprocessing_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HALF, **changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pretrained_cfg": {"crop_mode": "border"}}, "crop_mode"),
        ({"image_mean": [0.5], "do_rescale": False}, "rescale_factor"),
        ({"image_mean": [0.5], "resample": 0, "size": 8}, "resample"),
        (
            {"image_mean": [0.5], "size": 8, "do_resize": False, "do_center_crop": 1},
            "must be false without do_resize",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        preprocessing.read(config)


def test_images_that_are_not_resized_are_seen_whole():
    size = {"height": 8, "width": 4}
    config = {"image_mean": [0.5], "image_std": [1.0], "size": size}
    assert preprocessing.read(config | {"do_resize": False}) == Preprocessing(
        mean=(0.5,), std=(1.0,), interpolation="bilinear"
    )


def test_other_files_describe_none():
    assert preprocessing.read({"architectures": ["ViT"]}) is None
