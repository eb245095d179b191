import io
import os
import re
import zipfile

import numpy as np
import pytest
import small_sources as small
from small_sources import IMAGES, LABELS

from tanager.data import mapped
from tanager.data.mapped import find_mapped


def write_imagenet_32(path, save=np.savez, labels_from=1):
    planes = [np.full((2, 3, 32, 32), batch, np.uint8) for batch in range(11)]
    for batch, images in enumerate(planes):
        images[:, 0, 1, 2] = 200
        name = f"train_data_batch_{batch}.npz" if batch else "val_data.npz"
        labels = np.array([batch, 1000 - batch]) - 1 + labels_from
        if not batch:
            labels = np.array([1, 1000])
        mean = np.zeros(3072)
        save(path / name, data=images.reshape(2, -1), labels=labels, mean=mean)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_imagenet_32_as_distributed(tmp_path, own_cache, save):
    write_imagenet_32(tmp_path, save)
    found = find_mapped(tmp_path, ("val",))
    assert found is not None
    train, test = found
    assert (len(train), len(test), train.shape) == (20, 2, (32, 32, 3))
    np.testing.assert_array_equal(train.labels[[0, 1, 18, 19]], [0, 998, 9, 989])
    np.testing.assert_array_equal(test.labels, [0, 999])
    image = train[19]["image"]  # Of the tenth batch, not of the second by name.
    assert tuple(image[0, 0]) == (10, 10, 10)
    assert tuple(image[1, 2]) == (200, 10, 10)
    extracted = list(own_cache.rglob("*.npy"))
    assert len(extracted) == (11 if save is np.savez_compressed else 0)


def test_a_compressed_array_is_copied_out_once(tmp_path, own_cache, monkeypatch):
    small.make_npz(tmp_path, save=np.savez_compressed)
    source = small.open_mapped(tmp_path)
    np.testing.assert_array_equal(source[3]["image"], IMAGES[3])
    monkeypatch.setattr(mapped.shutil, "copyfileobj", None)
    np.testing.assert_array_equal(small.open_mapped(tmp_path)[9]["image"], IMAGES[9])


def test_a_copy_cut_off_is_made_again(tmp_path, own_cache, monkeypatch):
    small.make_npz(tmp_path, save=np.savez_compressed)

    def cut(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mapped.shutil, "copyfileobj", cut)
        small.open_mapped(tmp_path)
    assert not [file for file in own_cache.rglob("*") if file.is_file()]
    np.testing.assert_array_equal(small.open_mapped(tmp_path)[9]["image"], IMAGES[9])


def test_members_are_mapped_where_they_lie(tmp_path):
    """Also where a header before them has an extra field, as zips of others do."""
    buffers = {}
    for name, array in (("labels", LABELS), ("images", IMAGES)):
        np.save(buffer := io.BytesIO(), array)
        buffers[name] = buffer.getvalue()
    for split in ("train", "test"):
        with zipfile.ZipFile(tmp_path / f"{split}.npz", "w") as archive:
            for name, content in buffers.items():
                info = zipfile.ZipInfo(f"{name}.npy")
                info.extra = b"\x99\x99\x04\x00abcd"
                archive.writestr(info, content)
    source = small.open_mapped(tmp_path)
    np.testing.assert_array_equal(source[5]["image"], IMAGES[5])


def npy(name, array, **options):
    return lambda path: np.save(path / f"{name}.npy", array, **options)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (npy("train_images", IMAGES[0]), "has images as uint8[8, 8, 3]: they must be"),
        (npy("train_images", IMAGES.astype(np.int16)), "has images as int16[10, 8, 8"),
        (npy("train_images", np.asfortranarray(IMAGES)), "has images in Fortran's ord"),
        (
            npy("train_images", IMAGES.astype(object), allow_pickle=True),
            "has images in Fortran's order, or as objects",
        ),
        (lambda p: os.truncate(p / "train_images.npy", 400), "is truncated: get the"),
        (
            lambda p: (p / "train_images.npy").write_bytes(b"x"),
            "has no images that",
        ),
        (npy("train_labels", LABELS[:9]), "has labels [9] for 10 images"),
        (npy("train_labels", LABELS * 1.0), "has labels of float64: labels must be in"),
        (npy("train_labels", LABELS - 1), "row 0 has label -1: labels must be from 0"),
        (lambda p: (p / "train_labels.npy").unlink(), "has no labels that can be read"),
        (
            lambda p: (p / "test_images.npy").unlink(),
            "but none to test on: it needs",
        ),
    ],
)
def test_bad_arrays_are_named(tmp_path, spoil, message):
    small.make_npy(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        find_mapped(tmp_path, ("test",))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "train_data_batch_7.npz").unlink(), "batch_7.npz') has no ima"),
        (lambda p: (p / "val_data.npz").unlink(), "val_data.npz') has no images"),
        (
            lambda p: np.savez(p / "train_data_batch_7.npz", labels=np.arange(1, 3)),
            "it has no 'data.npy'",
        ),
        (lambda p: write_imagenet_32(p, labels_from=0), "row 0 has label -1"),
        (
            lambda p: os.truncate(p / "train_data_batch_7.npz", 3000),
            "batch_7.npz') has no images that can be read",
        ),
    ],
)
def test_bad_batches_are_named(tmp_path, spoil, message):
    write_imagenet_32(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        find_mapped(tmp_path, ("val",))
