import os
import re

import numpy as np
import pytest
import small_sources as small
from small_sources import IMAGES, LABELS

from tanager.data.labels import number_labels


def npy(name, array, **options):
    return lambda path: np.save(path / f"train_{name}.npy", array, **options)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (npy("images", IMAGES[0, 0]), "has images as uint8[8, 3]: they must be"),
        (npy("images", IMAGES[..., [0] * 5]), "8, 5]: they must be uint8[N, H, W] or"),
        (npy("images", IMAGES.astype(np.int16)), "has images as int16[10, 8, 8"),
        (npy("images", np.asfortranarray(IMAGES)), "has images in Fortran order"),
        (
            npy("images", IMAGES.astype(object), allow_pickle=True),
            "has images as object[10, 8, 8, 3]",
        ),
        (npy("images", IMAGES[:0]), "has no images"),
        (lambda p: os.truncate(p / "train_images.npy", 400), "is truncated: get the"),
        (
            lambda p: (p / "train_images.npy").write_bytes(b"x"),
            "has no images that",
        ),
        (npy("labels", LABELS[:9]), "has labels [9] for 10 images"),
        (npy("labels", LABELS * 1.0), "has labels of float64: give whole numbers"),
        (npy("labels", LABELS - 1), "row 0 has a label that is not 0 or above"),
        (npy("labels", LABELS + 1), "row 8 has a label that is not from 0 to 2"),
        (lambda p: (p / "train_labels.npy").unlink(), "has no labels that can be read"),
    ],
)
def test_bad_arrays_are_named(tmp_path, spoil, message):
    small.make_npy(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        number_labels([small.open_npy(tmp_path)], ("a", "b", "c"))
    assert str(tmp_path) in str(caught.value)
