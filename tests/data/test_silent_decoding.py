"""What libraries say of an image tells that it was read, and what is written in it."""

import io
import logging
import struct
import warnings

import numpy as np
import pytest
from PIL import Image

from tanager.data import decoding


PIXELS = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))


def saved(kind, **options):
    buffer = io.BytesIO()
    PIXELS.save(buffer, kind, **options)
    return buffer.getvalue()


def odd_tiff():
    """One with a description, and two values where a tag has one."""
    content = bytearray(saved("TIFF", tiffinfo={270: "Jane Doe"}))
    (start,) = struct.unpack_from("<I", content, 4)
    (entries,) = struct.unpack_from("<H", content, start)
    for at in range(start + 2, start + 2 + 12 * entries, 12):
        if struct.unpack_from("<H", content, at) == (284,):
            struct.pack_into("<I", content, at + 4, 2)
    return bytes(content)


def odd_dicom(**fields):
    pydicom = pytest.importorskip("pydicom")
    made = pydicom.dataset.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    made.SOPClassUID, made.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    made.Rows = made.Columns = made.BitsAllocated = made.BitsStored = 8
    made.HighBit, made.SamplesPerPixel, made.PixelRepresentation = 7, 1, 0
    made.PhotometricInterpretation, made.PixelData = "MONOCHROME2", bytes(64)
    for name, value in fields.items():
        setattr(made, name, value)
    buffer = io.BytesIO()
    made.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


ODD = {
    "png": lambda: saved("PNG"),
    "tiff": odd_tiff,
    "exif": lambda: saved("JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
    "more frames": lambda: odd_dicom(PixelData=bytes(200)),
    "frames": lambda: odd_dicom(NumberOfFrames=0),
    "slope": lambda: odd_dicom(RescaleSlope="1e308", RescaleIntercept="-1e308"),
}


@pytest.mark.parametrize("kind", ODD)
def test_nothing_is_said_of_an_image(kind, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = ODD[kind]()
    with caplog.at_level(logging.DEBUG), warnings.catch_warnings(record=True) as said:
        for _ in range(2):
            warnings.simplefilter("always")  # as the command does for its own
            decoding.decode_image(content, (8, 8, 1))
    assert [str(each.message) for each in said] == []
    assert caplog.text == ""
