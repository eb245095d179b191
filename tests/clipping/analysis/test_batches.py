"""A wrong batch is refused in one sentence, which names the leaf and no values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from tanager.clipping.analysis.batches import shapes_of
from tanager.clipping.analysis.keyed import words_of


PARAMS = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
DATA = {"image": np.zeros((6, 8), np.float32), "label": np.zeros(6, np.int32)}
NAMES = ["cat", "dog"] * 3
ROWS = [{name: array[row] for name, array in DATA.items()} for row in range(6)]
MASKED = np.ma.array(DATA["label"], mask=[True] * 6)


def loss(params, example):
    logits = example["image"] @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


GRAD = tanager.clipped_grad(loss, clip_norm=1.0)
NUMBERS = r"must be an array of numbers: number texts with numpy\.unique"
WRONG = {
    "texts": (
        {**DATA, "label": np.array(NAMES)},
        rf"\['label'\] \(=<U3\[6\]\) {NUMBERS}",
    ),
    "objects": (
        {**DATA, "label": np.array(NAMES, object)},
        rf"=object\[6\]\) {NUMBERS}",
    ),
    "a list of texts": ({**DATA, "label": NAMES}, rf"\[0\] \(of type str\) {NUMBERS}"),
    "dates": ({**DATA, "day": np.zeros(6, "M8[D]")}, "must be an array of numbers"),
    "fields": (np.zeros(6, [("a", "f4")]), "must be an array of numbers"),
    "a word": ("digits", r"^batch \(of type str\) must be an array of numbers"),
    "masked": ({**DATA, "label": MASKED}, r"\['label'\] .* must have no mask"),
    "rows": (ROWS, r"batch \(a list of length 6\) must .* stack the rows, jax\.tree"),
    "pairs": ([(row["image"], 3) for row in ROWS], "stack the rows"),
    "a scalar": (
        {**DATA, "scale": 0.25},
        r"\['scale'\] \(of type float\) must have an",
    ),
    "only a scalar": ({"scale": 0.25}, "must have an entry for each row"),
    "a list": ({**DATA, "label": [7] * 6}, "must have an entry .* an array of a list"),
    "fewer": (
        {**DATA, "label": DATA["label"][:5]},
        r"batch\['label'\] \(=int32\[5\]\) must have as many rows as batch\['image'\]",
    ),
    "nothing": ({}, "share one leading axis of rows: it holds no array"),
}


@pytest.mark.parametrize(("batch", "said"), WRONG.values(), ids=WRONG)
def test_what_is_no_batch_is_named(batch, said):
    for call in (GRAD, GRAD.explain):
        with pytest.raises(ValueError, match=said) as error:
            call(PARAMS, batch)
        assert not any(
            value in str(error.value) for value in ("cat", "dog", "0.25", "7")
        )


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ("cat", r"mask \(of type str\) must be bool\[6\].*: give the mask of a Phys"),
        (np.array(["cat"] * 6), r"mask \(of type ndarray\) must be bool\[6\]"),
        (np.array([True] * 6, object), r"mask \(of type ndarray\) must be bool\[6\]"),
        (np.ones(6), r"mask \(=float32\[6\]\) must be .*weights into the batch and"),
        (
            jax.random.split(jax.random.key(0), 6),
            "random keys go into keys=",
        ),
    ],
)
def test_what_is_no_mask_is_named(mask, said):
    with pytest.raises(ValueError, match=said) as error:
        GRAD(PARAMS, DATA, mask)
    assert error.value.__context__ is None


def test_exchanged_arguments_are_noticed():
    for call in (GRAD, jax.jit(lambda *both: GRAD(*both))):
        with pytest.raises(ValueError, match="are the arguments exchanged"):
            call(DATA, PARAMS)
    with pytest.raises(KeyError) as error:
        GRAD(DATA, {"w": PARAMS["w"]})
    assert error.value.__notes__[-1].startswith("are the arguments exchanged?")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (jax.random.key(0), r"keys \(=one key\) must be one threefry key for each of"),
        (jax.random.PRNGKey(0), r"\(=one key\) .* or jax\.random\.split\(key, 6\)"),
        (jax.random.split(jax.random.key(0), 5), r"keys \(=uint32\[5, 2\]\) must be"),
        (0, r"keys \(of type int\) must be one threefry key"),
    ],
)
def test_keys_are_one_for_each_row(keys, said):
    with pytest.raises(ValueError, match=said):
        words_of(keys, 6)


def test_what_is_no_array_is_told_apart_by_type_and_value():
    """Else the trace of one would be used for another, and its checks."""
    values = 1, True, 1.0, 2, None, "1"
    values += np.float32(1), np.int32(1), np.ones(1), np.ones(2)
    keys = [shapes_of({"a": value}) for value in values]
    for number, key in enumerate(keys):
        assert keys.index(key) == number
    assert shapes_of({"a": 1}) == keys[0] != shapes_of({"b": 1})
    assert shapes_of({"a": {1}}) != shapes_of({"a": {1}})  # a set may change
