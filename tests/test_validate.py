import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager import _validate as validate


def refused(message):
    return pytest.raises(ValueError, match="^" + re.escape(message) + "$")


RANGES = {
    validate.positive: (
        [1e-300, 1, 1e300, np.float32(2), Fraction(1, 3)],
        [0, -1.0, math.inf],
        "must be positive and finite",
    ),
    validate.not_negative: (
        [0, 0.0, np.int64(3), 1e300],
        [-1e-9, math.inf],
        "must be finite and not negative",
    ),
    validate.fraction: (
        [1e-300, 0.5, 1],
        [0, 1.1, -1],
        "must be above 0 and at most 1",
    ),
    validate.probability: (
        [1e-300, 0.5, 1 - 1e-16],
        [0, 1, 2.0],
        "must be strictly between 0 and 1",
    ),
}


@pytest.mark.parametrize(("check", "case"), RANGES.items())
def test_values_in_range_pass_and_others_are_refused(check, case):
    inside, outside, rule = case
    for value in inside:
        check(x=value)
    for value in outside:
        with refused(f"x (={value!r}) {rule}: try another"):
            check(x=value, remedy="try another")
    for value in (True, "1", None, 1j):
        with refused(f"x (={value!r}) must be a number"):
            check(x=value)
    with refused("x (=nan) must be a number: it is not-a-number"):
        check(x=math.nan)
    with refused(f"b (={outside[0]!r}) {rule}"):
        check(a=inside[-1], b=outside[0], c=-2)


def test_whole_numbers_of_any_length_are_checked():
    with refused("x (=a number of 1329 bits) must be positive and finite"):
        validate.positive(x=10**400)
    with refused("x (=a number of 19932 bits) must be finite and not negative"):
        validate.not_negative(x=-(10**6000))
    with refused(f"steps (={2**63}) must be at most {2**63 - 1}: wait"):
        validate.whole(steps=2**63, at_least=1, remedy="wait")
    validate.whole(steps=2**63 - 1, at_least=1)


def test_whole():
    validate.whole(steps=0, at_least=0)
    validate.whole(steps=np.int32(3), at_least=3)  # pyrefly: ignore[bad-argument-type]
    with refused("steps (=2) must be at least 3: more"):
        validate.whole(steps=2, at_least=3, remedy="more")
    for value in (3.0, True, "3", None):
        with refused(f"steps (={value!r}) must be a whole number"):
            validate.whole(steps=value, at_least=0)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_an_array_of_one_number_is_refused_with_what_to_give(array):
    with refused("x (=float32[]) must be a number: give float(x)"):
        validate.positive(x=array(np.float32(2)))
    with refused("steps (=int32[]) must be a whole number: give int(steps)"):
        validate.whole(steps=array(np.int32(2)), at_least=1, remedy="more")
    with refused("steps (=float32[]) must be a whole number: more"):
        validate.whole(steps=array(np.float32(2)), at_least=1, remedy="more")


def test_a_key_of_jax_is_no_number():
    key: Any = jax.random.key(0)
    with refused("seed (=key<fry>[]) must be a whole number"):
        validate.whole(seed=key, at_least=0)
    with refused("x (=key<fry>[]) must be a number"):
        validate.positive(x=key)


def test_one_of_offers_the_nearest():
    validate.one_of(["ghost", "auto"], strategy="auto")
    with refused(
        "strategy (='gost') is unknown: did you mean ghost? It must be one of ghost, "
        "auto"
    ):
        validate.one_of(["ghost", "auto"], strategy="gost")
    with refused("split (='val') must be one of test, train, all"):
        validate.one_of(["test", "train", "all"], split="val")
    ending = "did you mean r-7? It must be one of " + ", ".join(
        f"r-{number}" for number in range(8)
    )
    with refused(f"recipe (='r7') is unknown: {ending} and 12 more"):
        validate.one_of([f"r-{number}" for number in range(20)], recipe="r7")
    with refused("strategy (='xyzzy') must be one of ghost, auto: see the docs"):
        validate.one_of(["ghost", "auto"], strategy="xyzzy", remedy="see the docs")


def test_nearest():
    assert validate.nearest("nose", ["noise", "steps"]) == "noise"
    assert validate.nearest("qqq", ["noise", "steps"]) is None


@dataclasses.dataclass
class Held:
    image: Any


SHOWN = {
    "int32[30]": np.arange(30, dtype=np.int32),
    "float32[]": jnp.zeros(()),
    "int32[2, 3]": jnp.zeros((2, 3), jnp.int32),
    "dict of 2": {"image": np.zeros((3, 4)), "label": np.zeros(3)},
    "list of 9": [0, 1, 2, 3, 4, 5, 6, 7, 8],
    "list of 3": [[0.5, 0.5, 0.25]] * 3,
    "tuple of 1": (np.ones(2),),
    "bytes of 3": b"\xff\xd8\xff",
    "Held": Held(np.ones(3)),
    "object": object(),
    "[32, 32, 3]": [32, 32, 3],
    "((32, 32), 3)": ((32, 32), 3),
    "{'nesterov': True}": {"nesterov": True},
    "np.float32(2.0)": np.float32(2),
    "Held(image='a.png')": Held("a.png"),
}


@pytest.mark.parametrize(("said", "value"), SHOWN.items(), ids=SHOWN)
def test_a_message_shows_settings_and_nothing_of_data(said, value):
    assert validate.message("x", value, "is wrong") == f"x (={said}) is wrong"


def test_long_values_are_cut():
    assert len(validate.shown([10**400])) == 200
    assert len(validate.shown("a" * 5000)) == 1000
    assert validate.shown("/data/" * 40) == repr("/data/" * 40)
