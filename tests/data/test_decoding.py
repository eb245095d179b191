import io
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tanager.data import decoding


RGB = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8).repeat(4, 0)
)
SHAPE = (36, 12, 3)


def saved(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(content, shape=SHAPE):
    return decoding.decode_image(content, shape)


def test_the_shorter_side_is_scaled_and_the_middle_kept():
    expected = ImageOps.fit(RGB, (8, 8), method=Image.Resampling.BICUBIC)
    found = decoded(saved(RGB), (8, 8, 3))
    np.testing.assert_array_equal(found, np.asarray(expected))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "YCbCr"])
def test_modes_become_rgb(tmp_path, mode):
    """As torchvision's loader of ImageNet: Pillow's convert, whatever the name says."""
    image = RGB.convert(mode)
    content = saved(image, "JPEG" if mode in ("CMYK", "YCbCr") else "PNG")
    file = tmp_path / "named.JPEG"
    file.write_bytes(content)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    for source in (content, file, str(file)):
        np.testing.assert_array_equal(decoded(source), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_dropped(mode):
    image = RGB.convert(mode)
    image.putalpha(0)
    expected = np.asarray(RGB.convert(mode[:-1]).convert("RGB"))
    np.testing.assert_array_equal(decoded(saved(image)), expected)


def test_palettes_with_transparency_do_not_warn():
    image = RGB.quantize(7)
    expected = np.asarray(image.convert("RGB"))
    content = saved(image, transparency=bytes(range(7)))
    np.testing.assert_array_equal(decoded(content), expected)


def test_grey_where_one_channel_is_wanted():
    found = decoded(saved(RGB), (36, 12, 1))
    np.testing.assert_array_equal(found[..., 0], np.asarray(RGB.convert("L")))


def test_more_than_8_bits_are_refused():
    deep = Image.fromarray(np.full((8, 8), 40_000, np.uint16))
    with pytest.raises(ValueError, match="more than 8 bits per channel"):
        decoded(saved(deep))


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 36\n%%EndComments\n"
    b"12 36 scale showpage\n%%EOF\n"
)


@pytest.mark.parametrize(
    "content",
    [
        POSTSCRIPT,
        b"",
        b"GIF89a",
        *(saved(RGB, kind) for kind in ("TIFF", "BMP", "GIF")),
    ],
)
def test_other_formats_start_no_decoder(tmp_path, content, monkeypatch):
    """A PostScript file named .png would otherwise be run by Ghostscript."""
    monkeypatch.setattr(subprocess, "Popen", None)
    file = tmp_path / "named.png"
    file.write_bytes(content)
    for source in (content, file):
        with pytest.raises(ValueError, match="is not a PNG or JPEG image: convert it"):
            decoded(source)


def test_an_image_of_too_many_pixels_is_not_decoded(monkeypatch):
    monkeypatch.setattr(decoding, "LARGEST", 12 * 36 - 1)
    with pytest.raises(ValueError, match="it has 12 × 36 pixels; at most 431 are"):
        decoded(saved(RGB))


def test_every_image_of_the_package_is_opened_in_one_place():
    for file in Path(decoding.__file__).parents[1].rglob("*.py"):
        if file != Path(decoding.__file__):
            assert "Image.open" not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize(("mode", "size"), [("L", (12, 36)), ("RGB", (36, 12))])
def test_exact_shape(mode, size):
    content = saved(RGB.convert(mode).resize(size))
    with pytest.raises(ValueError, match="and must be RGB, 36 × 12"):
        decoding.decode_image(content, SHAPE, exact=True)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_truncated_images_are_refused(kind):
    with pytest.raises(OSError, match="truncated"):
        decoded(saved(RGB, kind)[:-40])


def test_no_file_of_the_package_unpickles_what_it_does_not_know():
    """Two readers of weights look each name up in a table of their own."""
    root, found = Path(decoding.__file__).parents[1], set()
    for file in root.rglob("*.py"):
        words = file.read_text(encoding="utf-8")
        assert "allow_pickle=True" not in words
        if re.search(r"^\s*(import|from) (c?pickle|dill|marshal)\b", words, re.M):
            found.add(file.relative_to(root).as_posix())
            assert "def find_class" in words
            assert not re.search(r"\bpickle\.loads?\b", words)
    assert found == {"models/pickled.py", "models/pytorch.py"}
