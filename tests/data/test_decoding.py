import contextlib
import io
import itertools
import re
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tanager.data import decoding, given


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


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_without_a_public_range_are_refused(dtype):
    deep = Image.fromarray(np.full((8, 8), 40_000, dtype))
    with pytest.raises(ValueError, match="have no public range: convert it to 8"):
        decoded(saved(deep, "TIFF"))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bits_become_8_by_one_rule(kind):
    """The same for each image: an image of few levels is not stretched."""
    for most in (65_536, 300):
        values = np.random.default_rng(0).integers(0, most, (36, 12)).astype(np.uint16)
        content = saved(Image.fromarray(values), kind)
        found = decoded(content, (36, 12, 1))
        np.testing.assert_array_equal(found[..., 0], values >> 8)


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_16_bits_of_pillow_are_read_as_those_of_a_file(mode, orientation):
    values = np.random.default_rng(0).integers(0, 65_536, (36, 12)).astype(np.uint16)
    stored = values.astype(">u2" if mode == "I;16B" else "<u2").tobytes()
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(Image.frombytes(mode, (12, 36), stored), "TIFF", exif=exif)
    shape = (36, 12, 1) if orientation == 1 else (12, 36, 1)
    with Image.open(io.BytesIO(content)) as image:
        assert image.mode == mode
        found = given.read_image(image, shape)
    np.testing.assert_array_equal(found, decoded(content, shape))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_images_are_turned_upright(kind):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = saved(RGB, kind, exif=exif)
        with Image.open(io.BytesIO(content)) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
        with decoding.open_image(content) as image:
            assert decoding.upright_size(image) == upright.size[::-1]
        found = decoded(content, (*upright.size[::-1], 3))
        np.testing.assert_array_equal(found, np.asarray(upright))


@pytest.mark.parametrize("kind", ["TIFF", "BMP", "GIF", "WEBP"])
def test_other_formats(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    frames = [RGB.rotate(180)] if kind == "GIF" else []
    if frames:
        options = {"save_all": True, "append_images": frames}
    content = saved(RGB, kind, **options)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decoded(content), expected)


def test_damaged_exif_is_no_exif():
    content = saved(RGB, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decoded(content).shape == SHAPE


POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 36\n%%EndComments\n"
    b"12 36 scale showpage\n%%EOF\n"
)


@pytest.mark.parametrize(
    "content",
    [
        POSTSCRIPT,
        b"",
        *(saved(RGB, kind) for kind in ("PPM", "TGA", "ICNS")),
    ],
)
def test_other_formats_start_no_decoder(tmp_path, content, monkeypatch):
    """A PostScript file named .png would otherwise be run by Ghostscript."""
    monkeypatch.setattr(subprocess, "Popen", None)
    file = tmp_path / "named.png"
    file.write_bytes(content)
    rule = "is not a PNG, JPEG, WebP, TIFF, BMP" if content else "it is empty"
    for source in (content, file):
        with pytest.raises(ValueError, match=rule):
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


def dicom(pixels, **changes):
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.dataset.FileDataset("", {}, preamble=bytes(128))
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    data.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    colour = pixels.ndim == 3
    fields = {
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": 3 if colour else 1,
        "PhotometricInterpretation": "RGB" if colour else "MONOCHROME2",
        "BitsAllocated": 8 * pixels.dtype.itemsize,
        "BitsStored": 8 if colour else 12,
        "HighBit": 7 if colour else 11,
        "PixelRepresentation": 0,
        "PixelData": pixels.tobytes(),
        "PatientName": "Zoe Example",
    }
    for name, value in {
        **fields,
        **({"PlanarConfiguration": 0} if colour else {}),
    }.items():
        setattr(data, name, changes.pop(name, value))
    for name, value in changes.items():
        setattr(data, name, value)
    buffer = io.BytesIO()
    pydicom.dcmwrite(buffer, data, enforce_file_format=True)
    return buffer.getvalue()


VALUES = np.arange(0, 4096, 64, dtype=np.uint16).reshape(8, 8)


def test_dicom_by_its_own_numbers():
    shape = (8, 8, 1)
    plain = np.rint(255 * (VALUES / 4095))
    np.testing.assert_array_equal(decoded(dicom(VALUES), shape)[..., 0], plain)
    inverted = dicom(VALUES, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(decoded(inverted, shape)[..., 0], 255 - plain)
    # Hounsfield units from 1000·v/1024 − 1000, and a window of 400 around 40.
    numbers = VALUES * 2.0 - 1000
    window = dicom(
        VALUES,
        RescaleSlope=2,
        RescaleIntercept=-1000,
        WindowCenter=[40, 999],
        WindowWidth=[400, 1],
    )
    expected = np.rint(255 * np.clip((numbers - 39.5) / 399 + 0.5, 0, 1))
    found = decoded(window, shape)[..., 0]
    np.testing.assert_array_equal(found, expected)
    assert {*np.unique(found)} > {0, 255}
    pixels = np.asarray(RGB)
    np.testing.assert_array_equal(decoded(dicom(pixels)), pixels)


def test_dicom_whose_preamble_is_a_tiff_of_other_pixels():
    directory = b"".join(
        struct.pack("<HHII", tag, kind, 1, value)
        for tag, kind, value in [
            (256, 3, 1),
            (257, 3, 1),
            (258, 3, 8),
            (259, 3, 1),
            (262, 3, 1),
            (273, 4, 110),
            (279, 4, 1),
        ]
    )
    tiff = struct.pack("<2sHIH", b"II", 42, 8, 7) + directory + bytes(4)
    both = tiff.ljust(128, b"\0") + dicom(VALUES)[128:]
    with Image.open(io.BytesIO(both)) as other:
        assert (other.format, other.size) == ("TIFF", (1, 1))
    shape = (8, 8, 1)
    np.testing.assert_array_equal(decoded(both, shape), decoded(dicom(VALUES), shape))


def lut(entries, first, bits):
    """A table of LUTs: a steep curve over entries from `first` on."""
    pydicom = pytest.importorskip("pydicom")
    item = pydicom.dataset.Dataset()
    curve = (np.linspace(0, 1, entries) ** 3 * (2**bits - 1)).astype(int)
    for name, vr, value in (
        ("LUTDescriptor", "SS", [entries, first, bits]),
        ("LUTData", "US", curve.tolist()),
    ):
        item.add_new(pydicom.datadict.tag_for_keyword(name), vr, value)
    return item


def enhanced(**fields):
    """What an enhanced file says of the values of all frames."""
    pydicom = pytest.importorskip("pydicom")
    group, item = pydicom.dataset.Dataset(), pydicom.dataset.Dataset()
    for name, value in fields.items():
        setattr(item, name, value)
    group.FrameVOILUTSequence = [item]
    return {"SharedFunctionalGroupsSequence": [group]}


GREY_DICOM = {
    "voi": lambda: {"VOILUTSequence": [lut(3000, 500, 12)], "WindowWidth": 9},
    "voi of rescaled": lambda: {
        "VOILUTSequence": [lut(2000, -900, 16), lut(9, 0, 16)],
        "RescaleSlope": 1,
        "RescaleIntercept": -1024,
    },
    "modality": lambda: {"ModalityLUTSequence": [lut(4096, 0, 16)]},
    "modality and window": lambda: {
        "ModalityLUTSequence": [lut(4000, 9, 16)],
        "WindowCenter": 20_000,
        "WindowWidth": 30_000,
    },
    "sigmoid": lambda: {
        "WindowCenter": [2000, 1],
        "WindowWidth": [900, 1],
        "VOILUTFunction": "SIGMOID",
    },
    "exact": lambda: {
        "WindowCenter": 0.3,
        "WindowWidth": 0.5,
        "VOILUTFunction": "LINEAR_EXACT",
        "RescaleSlope": 1 / 4096,
        "RescaleIntercept": 0,
    },
    "falling": lambda: {
        "WindowCenter": -2000,
        "WindowWidth": 1000,
        "RescaleSlope": -1,
        "RescaleIntercept": 0,
    },
}


@pytest.mark.parametrize("name", GREY_DICOM)
def test_dicom_tables_as_pydicom_applies_them(name):
    pixels = pytest.importorskip("pydicom.pixels")
    import pydicom

    fields = GREY_DICOM[name]()
    written = dicom(VALUES, **fields)
    data = pydicom.dcmread(io.BytesIO(written))
    values = pixels.apply_modality_lut(data.pixel_array, data)
    if "VOILUTSequence" in data:
        values = pixels.apply_voi(values.astype(int), data).astype(float)
        bits = data.VOILUTSequence[0].LUTDescriptor[2]
        expected = values / (2**bits - 1)
    else:
        values = pixels.apply_windowing(values, data).astype(float)
        ends = {"sigmoid": (0, 4095), "exact": (0, 4095 / 4096), "falling": (0, -4095)}
        low, high = ends.get(name, (0, 65535))
        expected = (values - low) / (high - low)
    expected = np.rint(255 * expected)
    assert len(np.unique(expected)) > 10
    shape = (8, 8, 1)
    np.testing.assert_array_equal(decoded(written, shape)[..., 0], expected)
    inverted = dicom(
        VALUES, **GREY_DICOM[name](), PhotometricInterpretation="MONOCHROME1"
    )
    np.testing.assert_array_equal(decoded(inverted, shape)[..., 0], 255 - expected)


def test_dicom_tables_that_pydicom_gets_wrong():
    """It counts entries in 8 bits if they have 8, and fails on 12 of a modality."""
    expected = np.rint(np.floor(np.linspace(0, 1, 4096) ** 3 * 255))[VALUES]
    found = decoded(dicom(VALUES, VOILUTSequence=[lut(4096, 0, 8)]), (8, 8, 1))
    np.testing.assert_array_equal(found[..., 0], expected)
    found = decoded(dicom(VALUES, ModalityLUTSequence=[lut(4096, 0, 12)]), (8, 8, 1))
    np.testing.assert_allclose(found[..., 0], expected, atol=1)


def test_dicom_of_enhanced_files_and_of_several_frames():
    window = {"WindowCenter": 900, "WindowWidth": 500}
    plain = decoded(dicom(VALUES, **window))
    frames = dicom(VALUES, NumberOfFrames=2, PixelData=VALUES.tobytes() * 2, **window)
    np.testing.assert_array_equal(decoded(frames), plain)
    np.testing.assert_array_equal(decoded(dicom(VALUES, **enhanced(**window))), plain)
    empty = {"WindowCenter": None, "RescaleSlope": None, "RescaleIntercept": ""}
    np.testing.assert_array_equal(
        decoded(dicom(VALUES, **empty)), decoded(dicom(VALUES))
    )


@pytest.mark.parametrize(("entries", "bits"), [(256, 8), (4001, 8), (256, 16)])
def test_dicom_palettes(entries, bits):
    pixels = pytest.importorskip("pydicom.pixels")
    import pydicom

    draw = np.random.default_rng(0)
    tables = draw.integers(0, 2**bits, (3, entries), f"uint{bits}")
    fields: dict = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        name = f"{colour}PaletteColorLookupTable"
        fields[f"{name}Data"] = table.tobytes() + bytes(entries % 2)
        fields[f"{name}Descriptor"] = [entries, 0, bits]
    values = VALUES if entries > 256 else (VALUES >> 4)
    written = dicom(values, **fields)
    expected = tables[:, np.minimum(values, entries - 1)].transpose(1, 2, 0)
    found = decoded(written, (8, 8, 3))
    np.testing.assert_array_equal(found, expected >> (bits - 8))
    if entries == 256:
        data = pydicom.dcmread(io.BytesIO(written))
        by_pydicom = pixels.apply_color_lut(data.pixel_array, data)
        np.testing.assert_array_equal(by_pydicom, expected)


def test_threads_leave_the_settings_of_pydicom(monkeypatch):
    from pydicom import config
    from pydicom.pixels import utils

    met = threading.Barrier(2)
    read = utils.pixel_array

    def slow(*args, **options):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(0.2)  # two that read at once meet here
            time.sleep(0.05 * next(numbers))
        return read(*args, **options)

    numbers = itertools.count()
    monkeypatch.setattr(utils, "pixel_array", slow)
    before = config.settings.reading_validation_mode
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(decoded, [dicom(VALUES)] * 2))
    assert config.settings.reading_validation_mode == before
    assert met.broken


def test_dicom_that_cannot_be_read_shows_no_value(monkeypatch):
    good = dicom(VALUES)
    with pytest.raises(ValueError, match="interpretation is not read: convert it"):
        decoded(dicom(VALUES, PhotometricInterpretation="HSV"))
    monkeypatch.setattr(decoding, "LARGEST", 63)
    with pytest.raises(ValueError, match="too many pixels"):
        decoded(good)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="pydicom cannot decode it") as refused:
        decoded(good[:-80])
    assert "Zoe" not in str(refused.value)
    assert "pylibjpeg" not in str(refused.value)  # it is not compressed
    data, without = sys.modules["pydicom"].dcmread(io.BytesIO(good)), io.BytesIO()
    del data.PixelData
    data.save_as(without)
    with pytest.raises(ValueError, match="without pixel data, so no image"):
        decoded(without.getvalue())
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"pip install 'tanager-dp\[dicom\]'"):
        decoded(good)
