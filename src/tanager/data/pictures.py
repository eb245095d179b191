"""From the bytes of an encoded image to pixels of one shape."""

import io
import os

import numpy as np


_DEEP = ("I", "F")


def decode(
    content: bytes | str | os.PathLike[str],
    shape: tuple[int, int, int],
    exact: bool = False,
) -> np.ndarray:
    """Decode one image: PNG, JPEG or whatever else Pillow reads.

    It is told by its content, not its name: ImageNet has a PNG named .JPEG. As
    torchvision does for ImageNet, every picture of 8 bits becomes RGB (grey where C is
    1): grey is repeated, CMYK and palettes are converted, and transparency is dropped,
    which shows the colours that lay beneath it. Orientation told in EXIF is ignored.

    Args:
        content: the encoded bytes, or the file that holds them.
        shape: (H, W, C) to decode to: the shorter side is scaled, the middle is kept.
        exact: refuse an image that does not have this size and number of channels.

    Returns:
        uint8[H, W, C].

    Raises:
        Exception: the image is truncated, damaged, of more than 8 bits per channel, or
            no image; the file cannot be read. Pillow raises nearly anything.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    source = io.BytesIO(content) if isinstance(content, bytes) else content
    with Image.open(source) as image:
        if exact and (image.mode, image.size) != (mode, (width, height)):
            raise ValueError(
                f"it is an {image.mode} image of {image.size[1]} × {image.size[0]}, "
                f"and must be {mode}, {height} × {width}"
            )
        if image.mode.startswith(_DEEP):
            raise ValueError(f"it has mode {image.mode}, more than 8 bits per channel")
        # Pillow warns where a palette with transparency becomes RGB at once.
        alpha = image.mode == "P" and "transparency" in image.info
        picture = (image.convert("RGBA") if alpha else image).convert(mode)
    if picture.size != (width, height):
        method = Image.Resampling.BICUBIC
        picture = ImageOps.fit(picture, (width, height), method=method)
    return np.asarray(picture).reshape(shape)
