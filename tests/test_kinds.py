"""An argument of another kind is refused at once, in one sentence that names it."""

# pyrefly: ignore-errors[bad-argument-type]

import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from tanager.privacy.charges import Charge


MECHANISM = tanager.Mechanism(0.1, 1.0, 5)
SEED = tanager.Seed.from_int(0)
PARAMS = {"w": jnp.zeros(3)}
TWO = {**PARAMS, "b": [jnp.zeros(3), jnp.zeros(3)]}
DATA = {"x": np.zeros((10, 3), np.float32)}


def loss(params, example):
    return jnp.sum(params["w"] * example["x"])


PROBLEM = tanager.Problem(loss, PARAMS, DATA)
# As users have it: tests check types by a hook, which would speak first.
unchecked = inspect.unwrap(tanager.clipped_grad)
ALGORITHM = tanager.DPSGD(MECHANISM, optax.sgd(1.0), delta=1e-3)


def with_rng(params, example, rng):
    return jnp.sum(params["w"])


def with_key_by_name(params, example, *, key):
    return jnp.sum(params["w"])


WRONG = {
    **{
        f"no function as {name}": (
            lambda name=name: tanager.train(PROBLEM, ALGORITHM, **{name: "x"}),
            f"{name} (of type str) must be a function, or None",
        )
        for name in ("evaluate", "on_metrics", "on_estimate")
    },
    **{
        f"no function to {name}": (
            lambda name=name: tanager.Problem(loss, PARAMS, DATA, **{name: [1]}),
            f"{name} (of type list) must be a function, or None",
        )
        for name in ("augment", "finish", "labels")
    },
    "a description that nothing keeps": (
        lambda: tanager.train(PROBLEM, ALGORITHM, description={"by": "me"}),
        "description (={'by': 'me'}) does not apply without a folder",
    ),
    "a word for a bar": (
        lambda: tanager.Runtime(progress="no"),
        "progress (of type str) must be of type bool: True or False",
    ),
    "a number as seed": (
        lambda: tanager.GaussianNoise(MECHANISM, 1.0, 0, PARAMS),
        "seed (of type int) must be of type Seed: tanager.Seed.from_os()",
    ),
    "a key of JAX as seed": (
        lambda: tanager.example_keys(jax.random.key(0), 0, jnp.arange(3)),
        "must be of type Seed: tanager.Seed.from_os(), or that of the run",
    ),
    "a seed of the sampler": (
        lambda: tanager.PoissonSampler(MECHANISM, 10, 0),
        "seed (of type int) must be of type Seed",
    ),
    "the data in place of their number": (
        lambda: tanager.PoissonSampler(MECHANISM, DATA, SEED),
        "examples (=dict of 1) must be a whole number",
    ),
    "labels in place of their number": (
        lambda: tanager.PoissonSampler(MECHANISM, list(range(9)), SEED),
        "examples (=list of 9) must be a whole number",
    ),
    "a path as ledger": (
        lambda: tanager.GaussianNoise(MECHANISM, 1.0, SEED, PARAMS, "ledger.jsonl"),
        "ledger (of type str) must be of type Ledger: tanager.Ledger(path), or None",
    ),
    "a path as account": (
        lambda: tanager.Problem(loss, PARAMS, DATA, account="account.jsonl"),
        "account (of type str) must be of type Account: tanager.Account(path), or None",
    ),
    "owners as groups": (
        lambda: tanager.PoissonSampler(MECHANISM, 10, SEED, groups=[1] * 10),
        "groups (of type list) must be of type Groups: tanager.groups.Groups(owners)",
    ),
    "counts as class counts": (
        lambda: tanager.DPSGD(MECHANISM, optax.sgd(1.0), delta=1e-3, class_counts=[3]),
        "class_counts (of type list) must be of type Mechanism",
    ),
    "a loss in place of its gradient": (
        lambda: tanager.AdaptiveClipping().of(loss, MECHANISM, 8.0),
        "grad_fn (of type function) must be of type ClippedGrad: tanager.clipped_grad(",
    ),
    "a number to charge": (
        lambda: tanager.Ledger().charge(1.0, 0),
        "mechanism (of type float) must be of type Mechanism",
    ),
    "a number of classes": (
        lambda: tanager.Classification(loss, DATA, 10),
        "classes (=10) must be the names of the classes, in the order of the labels",
    ),
    "a word as classes": (
        lambda: tanager.Classification(loss, DATA, "cats"),
        "classes (='cats') must be the names of the classes",
    ),
    "a dict as mechanism": (
        lambda: tanager.GaussianNoise({"q": 1}, 1.0, SEED, PARAMS),
        "mechanism (of type dict) must be of type Mechanism: tanager.calibrate(…)",
    ),
    "a number as mechanism": (
        lambda: tanager.DPSGD(1.0, optax.sgd(1.0), delta=1e-3),
        "mechanism (of type float) must be of type Mechanism",
    ),
    "mechanisms in a list": (
        lambda: tanager.epsilon([MECHANISM], 1e-5),
        "must be of type Mechanism: give the mechanisms of several runs to tanager.",
    ),
    "risk of a list": (
        lambda: tanager.risk([MECHANISM]),
        "mechanism (of type list) must be of type Mechanism: risk(*mechanisms)",
    ),
    "a quantile as adaptive": (
        lambda: tanager.DPSGD(MECHANISM, optax.sgd(1.0), delta=1e-3, adaptive=0.5),
        "adaptive (of type float) must be of type AdaptiveClipping",
    ),
    "an adjacency that is none": (
        lambda: tanager.calibrate(
            epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=5, adjacency="add"
        ),
        "adjacency (='add') must be one of zero-out",
    ),
    "problem and algorithm exchanged": (
        lambda: tanager.train(ALGORITHM, PROBLEM),
        "problem (of type DPSGD) must be of type Problem: train(problem, algorithm, ",
    ),
    "a share of measuring": (
        lambda: tanager.Runtime(measure_share=2.0),
        "measure_share (=2.0) must be at most 1",
    ),
    "a word as loss": (
        lambda: tanager.Problem("loss", PARAMS, DATA),
        "loss (of type str) must be a function of (params, example)",
    ),
    "a key of another name": (
        lambda: tanager.clipped_grad(with_rng, clip_norm=1.0),
        "loss takes (params, example, rng), and must take (params, example) or",
    ),
    "such a loss of a problem": (
        lambda: tanager.Problem(with_rng, PARAMS, DATA),
        "call a random key `key`",
    ),
    "a key by name alone": (
        lambda: tanager.clipped_grad(with_key_by_name, clip_norm=1.0),
        "loss takes key in another place, and must take it third, by position",
    ),
    "a loss of one argument": (
        lambda: tanager.clipped_grad(lambda params: 0.0, clip_norm=1.0),
        "loss takes (params), and must take (params, example)",
    ),
    "a number as transform": (
        lambda: unchecked(loss, clip_norm=1.0, transform=3),
        "transform (=3) must be a function of one example's gradient",
    ),
    "a norm of no parameter": (
        lambda: tanager.clipped_grad(loss, clip_norm={"W": 1.0})(PARAMS, DATA),
        "what is clipped or of a part of it: it lacks ['w'], and it has ['W'] in addit",
    ),
    "a norm left out": (
        lambda: tanager.clipped_grad(loss, clip_norm={"w": 1.0})(TWO, DATA),
        "what is clipped or of a part of it: it lacks ['b'][0], ['b'][1]",
    ),
    "a parameter left out of trainable": (
        lambda: tanager.clipped_grad(loss, clip_norm=1.0, trainable={"w": True})(
            TWO, DATA
        ),
        "structure of params or of a part of it: it lacks ['b'][0], ['b'][1]",
    ),
    "other containers": (
        lambda: tanager.clipped_grad(
            loss, clip_norm=1.0, trainable={"w": True, "b": (True, False)}
        )(TWO, DATA),
        "the same leaves are in containers of other types",
    ),
    "a number in trainable": (
        lambda: tanager.clipped_grad(loss, clip_norm=1.0, trainable={"w": 1})(
            PARAMS, DATA
        ),
        "trainable['w'] (of type int) must be Python's True or False",
    ),
    "a norm of None": (
        lambda: tanager.clipped_grad(loss, clip_norm={"w": 1.0, "b": None})(TWO, DATA),
        "what is clipped or of a part of it: it lacks ['b'][0], ['b'][1]",
    ),
    "norms of parts that a transform joined": (
        lambda: tanager.clipped_grad(
            loss, clip_norm={"w": 1.0}, transform=lambda gradient: gradient["w"]
        )(PARAMS, DATA),
        "it lacks one for the only leaf, and it has ['w'] in addition",
    ),
    "a number as style": (
        lambda: unchecked(loss, clip_norm=1.0, style=3),
        "style (of type int) must be of type Style: clip, automatic, or tanager.clip",
    ),
    "None as the style of a run": (
        lambda: tanager.DPSGD(MECHANISM, optax.sgd(1.0), delta=1e-3, style=None),
        "style (of type NoneType) must be of type Style",
    ),
    "a word as has_aux": (
        lambda: unchecked(loss, clip_norm=1.0, has_aux="yes"),
        "has_aux (of type str) must be of type bool",
    ),
    "two batches": (
        lambda: tanager.clipped_grad(loss, clip_norm=1.0)(
            PARAMS, DATA, jnp.zeros(10, jnp.float32)
        ),
        "several arguments of the loss go into one tuple or dict, the batch",
    ),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_another_kind_is_refused_by_name(call, said):
    with pytest.raises(ValueError) as error:
        call()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_problem_is_shown_without_its_data():
    """Its parameters are left out too."""
    data = {"x": np.full((10, 3), 7.25)}
    persons = tanager.Grouped(data, ["person 7"] * 10)
    alone = tanager.Problem(loss, {"w": np.full(3, 7.25)}, data)
    for shown in map(repr, (alone, tanager.Problem(loss, PARAMS, persons), persons)):
        assert "7.25" not in shown and "person 7" not in shown


def test_what_is_private_until_noise_is_added_is_shown_by_shape():
    found = tanager.clipped_grad(loss, clip_norm=1.0)(PARAMS, DATA)
    assert "{'w': f32[3]}" in repr(found) and "0." not in repr(found)
    drawn = next(tanager.PoissonSampler(MECHANISM, 10, SEED).batches(0, 4))
    shown = "PhysicalBatch(examples=None, mask=bool[4], indices=int32[4])"
    assert repr(drawn) == shown


def test_a_result_is_shown_without_its_parameters():
    summary = {"epsilon": 3.0, "delta": 1e-4, "private": False, "steps": 5}
    found = tanager.TrainResult(PARAMS, PARAMS, 3.0, 1e-4, None, None, summary, None)
    shown = "TrainResult(epsilon=3.0, delta=0.0001, private=False, "
    assert repr(found).startswith(shown) and "0., 0." not in repr(found)


def test_a_problem_goes_to_another_process():
    assert pickle.loads(pickle.dumps(PROBLEM)).finish is PROBLEM.finish


def test_a_data_set_is_shown_without_its_persons_and_digests(tmp_path):
    """The digest of an account has no key: with it, a guess at the data is tested."""
    digits, persons = tanager.data.load("digits"), np.array(["person 7"] * 9)
    origin = functools.partial(sorted, persons.tolist())
    shown = repr(dataclasses.replace(digits, owners=persons, origin=origin))
    assert "person 7" not in shown and "classes=" in shown
    account = tanager.Account(tmp_path / "a", data="9f0c")
    problem = tanager.Problem(loss, PARAMS, DATA, account=account)
    account.charge(Charge("run", "one", "1", 1e-5, (tanager.Mechanism(1.0, 3.0, 4),)))
    for each in (account, problem, account.read()):
        assert "9f0c" not in repr(each)


@pytest.mark.parametrize(
    "given",
    [
        loss,
        lambda *both: loss(*both),
        lambda params, example, scale=1.0: scale * loss(params, example),
        functools.partial(lambda scale, *both: scale * loss(*both), 1.0),
        functools.partial(lambda p, e, *, scale: scale * loss(p, e), scale=1.0),
        jax.jit(loss),
    ],
)
def test_losses_however_they_are_spelt_are_taken(given):
    clipped = tanager.clipped_grad(given, clip_norm=1.0)(PARAMS, DATA)
    np.testing.assert_array_equal(clipped.sum["w"], 0)
