import functools

import equinox as eqx
import jax
from references import draw, parity

from tanager.models.bit import BiT, Variant
from tanager.models.foreign.tables import FORMATS


def _google_to_timm(google):
    """Where timm puts a tensor of Google's, after `_load_weights` of its resnetv2."""
    path = google.removeprefix("resnet/").split("/")
    leaf = {"kernel": "weight", "gamma": "weight", "beta": "bias", "bias": "bias"}
    ending = leaf[path[-1]]
    if path[0] == "head":
        return f"head.fc.{ending}"
    if path[0] == "root_block":
        return f"stem.conv.{ending}"
    if path[0] == "group_norm":
        return f"norm.{ending}"
    stage, block = int(path[0].removeprefix("block")) - 1, int(path[1][-2:]) - 1
    layer = "norm" if path[-2] == "group_norm" else "conv"
    number = "abc".index(path[2]) + 1
    part = "downsample.conv" if path[3] == "proj" else f"{layer}{number}"
    return f"stages.{stage}.blocks.{block}.{part}.{ending}"


def test_googles_files_give_the_same_model_as_timms():
    """Names and axes (height, width, in, out) as in Google's own `load_from`."""
    units = {1: 2, 2: 1, 3: 1}
    make = functools.partial(BiT, Variant(tuple(units.values()), 1), 5)
    shapes = eqx.filter_eval_shape(make, key=jax.random.key(0))
    expected = parity.fill(shapes, FORMATS[BiT]["timm"].names(shapes), draw.tensor)

    def from_google(name, shape):
        theirs = _google_to_timm(name)
        if len(shape) < 4:
            return draw.tensor(theirs, shape)
        height, width, inputs, outputs = shape
        kernel = draw.tensor(theirs, (outputs, inputs, height, width))
        return kernel.transpose(2, 3, 1, 0)

    table = FORMATS[BiT]["google"].names(shapes)
    assert eqx.tree_equal(parity.fill(shapes, table, from_google), expected)
    assert {foreign.names[0] for foreign in table.values()} == {
        "resnet/root_block/standardized_conv2d/kernel",
        "resnet/group_norm/gamma",
        "resnet/group_norm/beta",
        "resnet/head/conv2d/kernel",
        "resnet/head/conv2d/bias",
        *(f"resnet/block{b}/unit01/a/proj/standardized_conv2d/kernel" for b in units),
        *(
            f"resnet/block{block}/unit{unit:02d}/{letter}/{part}"
            for block, count in units.items()
            for unit in range(1, count + 1)
            for letter in "abc"
            for part in (
                "standardized_conv2d/kernel",
                "group_norm/gamma",
                "group_norm/beta",
            )
        ),
    }
