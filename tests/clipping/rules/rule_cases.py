"""Losses and convolutions that the tests of several rules share."""

import jax.numpy as jnp
from jax import lax
from oracle import draw, read


ROWS = 3


BOTH = ("float64", "float32")


def curve(y):
    """A scalar whose gradient differs in every entry of y and every example."""
    return jnp.sum(jnp.sin(y)) + 0.1 * jnp.sum(y * y)


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


CONVOLUTIONS = {
    # name: (image, kernel, layout, strides, padding, further arguments)
    "1-D, stride 2": ((1, 9, 2), (3, 2, 3), FLAT, (2,), "SAME", {}),
    "1-D, dilated": ((1, 9, 2), (3, 2, 3), FLAT, (1,), "VALID", {"dilation": (2,)}),
    "same": ((1, 5, 4, 2), (3, 3, 2, 3), PLANE, (1, 1), "SAME", {}),
    "valid, strides and dilations": (
        (1, 7, 6, 2),
        (2, 3, 2, 3),
        PLANE,
        (2, 1),
        "VALID",
        {"dilation": (3, 2)},
    ),
    "strides that skip the last pixels": (
        (1, 6, 7, 2),
        (2, 2, 2, 3),
        PLANE,
        (3, 3),
        "VALID",
        {},
    ),
    "asymmetric padding": (
        (1, 4, 4, 2),
        (3, 2, 2, 3),
        PLANE,
        (1, 2),
        ((2, 0), (0, 3)),
        {},
    ),
    "negative padding": (
        (1, 6, 6, 2),
        (3, 3, 2, 3),
        PLANE,
        (1, 1),
        ((-1, 0), (1, -2)),
        {},
    ),
    "3-D": ((1, 3, 4, 3, 2), (2, 2, 2, 2, 3), SOLID, (1, 2, 1), "SAME", {}),
    "groups": ((1, 4, 4, 4), (3, 3, 2, 6), PLANE, (1, 1), "SAME", {"groups": 2}),
    "depthwise": ((1, 4, 4, 3), (3, 3, 1, 6), PLANE, (2, 2), "SAME", {"groups": 3}),
    "batch groups": ((2, 4, 4, 3), (3, 3, 3, 4), PLANE, (1, 1), "SAME", {"packs": 2}),
    "transposed": (
        (1, 3, 3, 2),
        (3, 3, 2, 3),
        PLANE,
        (1, 1),
        ((1, 2), (2, 2)),
        {"spread": (2, 3)},
    ),
    "transposed, negative padding, groups": (
        (1, 4, 4, 4),
        (2, 2, 2, 2),
        PLANE,
        (2, 1),
        ((-1, 1), (0, -2)),
        {"spread": (2, 2), "groups": 2},
    ),
    "channels first": (
        (1, 2, 5, 4),
        (3, 2, 3, 3),
        ("NCHW", "OIHW", "NCHW"),
        (2, 1),
        "SAME",
        {},
    ),
    "odd layouts": (
        (5, 4, 2, 1),
        (4, 3, 2, 3),
        ("HWCN", "OHIW", "CHNW"),
        (1, 2),
        ((1, 1), (0, 1)),
        {},
    ),
    "odd layouts, groups": (
        (5, 4, 4, 1),
        (4, 2, 3, 3),
        ("HWCN", "OIWH", "CHNW"),
        (1, 2),
        ((1, 1), (0, 1)),
        {"groups": 2},
    ),
    "several images": ((3, 4, 4, 2), (2, 2, 2, 3), PLANE, (1, 1), "SAME", {}),
    "pointwise": ((1, 4, 3, 2), (1, 1, 2, 5), PLANE, (1, 1), "SAME", {}),
    "pointwise, strided": ((1, 5, 4, 2), (1, 1, 2, 5), PLANE, (2, 2), "VALID", {}),
    "patch embedding": ((1, 6, 4, 3), (2, 2, 3, 5), PLANE, (2, 2), "VALID", {}),
    "patches, some pixels left over, groups": (
        (2, 7, 5, 4),
        (3, 2, 2, 4),
        PLANE,
        (3, 2),
        ((0, 1), (0, 0)),
        {"groups": 2},
    ),
    "patches, channels first": (
        (1, 2, 5, 4),
        (3, 2, 3, 2),
        ("NCHW", "OIHW", "NCHW"),
        (3, 2),
        "SAME",
        {},
    ),
    "patches with gaps": (
        (1, 6, 6, 2),
        (2, 2, 2, 3),
        PLANE,
        (2, 2),
        "VALID",
        {"dilation": (2, 1)},
    ),
    "one position": ((1, 3, 3, 2), (3, 3, 2, 4), PLANE, (1, 1), "VALID", {}),
}


def convolution(name, rows=ROWS):
    image, kernel, layout, strides, padding, rest = CONVOLUTIONS[name]
    w, x = draw(1, kernel, (rows, *image))

    def apply(w, x):
        return conv(x, w, layout, strides, padding, **rest)

    return apply, 0.4 * w, x
