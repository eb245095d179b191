"""Losses and convolutions that the tests of several rules share."""

from typing import Any

from jax import lax
from oracle import curve as curve
from oracle import draw, read


ROWS = 3


BOTH = ("float64", "float32")


def only_group(loss, params, batch):
    (group,) = read(loss, params, batch)[1]
    return group


def conv(x, w, layout, strides, padding, spread=None, dilation=None, groups=1, packs=1):
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        padding,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
        batch_group_count=packs,
    )


FLAT, PLANE, SOLID = (
    ("NWC", "WIO", "NWC"),
    ("NHWC", "HWIO", "NHWC"),
    ("NHWDC", "HWDIO", "NHWDC"),
)


def case(image, kernel, strides=(1, 1), padding: Any = "SAME", layout=PLANE, **rest):
    """Shapes of an image and a kernel, and what `conv` takes besides."""
    return image, kernel, dict(layout=layout, strides=strides, padding=padding, **rest)


FIRST = ("NCHW", "OIHW", "NCHW")
UNEVEN = ((1, 1), (0, 1))

CONVOLUTIONS = {
    "1-D, stride 2": case((1, 9, 2), (3, 2, 3), (2,), layout=FLAT),
    "1-D, dilated": case((1, 9, 2), (3, 2, 3), (1,), "VALID", FLAT, dilation=(2,)),
    "same": case((1, 5, 4, 2), (3, 3, 2, 3)),
    "valid, strides and dilations": case(
        (1, 7, 6, 2), (2, 3, 2, 3), (2, 1), "VALID", dilation=(3, 2)
    ),
    "strides that skip the last pixels": case(
        (1, 6, 7, 2), (2, 2, 2, 3), (3, 3), "VALID"
    ),
    "asymmetric padding": case((1, 4, 4, 2), (3, 2, 2, 3), (1, 2), ((2, 0), (0, 3))),
    "negative padding": case((1, 6, 6, 2), (3, 3, 2, 3), padding=((-1, 0), (1, -2))),
    "3-D": case((1, 3, 4, 3, 2), (2, 2, 2, 2, 3), (1, 2, 1), layout=SOLID),
    "groups": case((1, 4, 4, 4), (3, 3, 2, 6), groups=2),
    "depthwise": case((1, 4, 4, 3), (3, 3, 1, 6), (2, 2), groups=3),
    "batch groups": case((2, 4, 4, 3), (3, 3, 3, 4), packs=2),
    "transposed": case(
        (1, 3, 3, 2), (3, 3, 2, 3), padding=((1, 2), (2, 2)), spread=(2, 3)
    ),
    "transposed, negative padding, groups": case(
        *((1, 4, 4, 4), (2, 2, 2, 2), (2, 1), ((-1, 1), (0, -2))),
        spread=(2, 2),
        groups=2,
    ),
    "transposed and dilated, several images, groups": case(
        *((2, 4, 3, 4), (2, 3, 2, 4), (1, 1), ((-1, 2), (3, -2))),
        dilation=(2, 1),
        spread=(2, 3),
        groups=2,
    ),
    "channels first": case((1, 2, 5, 4), (3, 2, 3, 3), (2, 1), layout=FIRST),
    "odd layouts": case(
        (5, 4, 2, 1), (4, 3, 2, 3), (1, 2), UNEVEN, ("HWCN", "OHIW", "CHNW")
    ),
    "odd layouts, groups": case(
        (5, 4, 4, 1), (4, 2, 3, 3), (1, 2), UNEVEN, ("HWCN", "OIWH", "CHNW"), groups=2
    ),
    "several images": case((3, 4, 4, 2), (2, 2, 2, 3)),
    "pointwise": case((1, 4, 3, 2), (1, 1, 2, 5)),
    "pointwise, strided": case((1, 5, 4, 2), (1, 1, 2, 5), (2, 2), "VALID"),
    "patch embedding": case((1, 6, 4, 3), (2, 2, 3, 5), (2, 2), "VALID"),
    "patches, some pixels left over, groups": case(
        (2, 7, 5, 4), (3, 2, 2, 4), (3, 2), ((0, 1), (0, 0)), groups=2
    ),
    "patches, channels first": case((1, 2, 5, 4), (3, 2, 3, 2), (3, 2), layout=FIRST),
    "patches with gaps": case(
        (1, 6, 6, 2), (2, 2, 2, 3), (2, 2), "VALID", dilation=(2, 1)
    ),
    "one position": case((1, 3, 3, 2), (3, 3, 2, 4), padding="VALID"),
}


def convolution(name, rows=ROWS):
    image, kernel, rest = CONVOLUTIONS[name]
    w, x = draw(1, kernel, (rows, *image))

    def apply(w, x):
        return conv(x, w, **rest)

    return apply, 0.4 * w, x
