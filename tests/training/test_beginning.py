"""What cannot work is refused before the first charge, in one plain message."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from small_runs import examples, first_params, loss, run

import tanager
from tanager.data import ArraySource, subset
from tanager.parallel import hosts
from tanager.privacy.mechanism import Mechanism
from tanager.training.beginning import check_examples, check_optimizer, check_parameters
from tanager.training.evaluate import Classification, Evaluation
from tanager.training.metrics import doubts


def with_a(number):
    params = first_params()
    return params | {"w": params["w"].at[1, 2].set(number)}


def aggregate():
    return optax.contrib.differentially_private_aggregate(1.0, 1.0, 0)


def noise():
    seed, params = tanager.Seed.from_int(0), {"w": jnp.zeros((3, 2))}
    mechanism = Mechanism(0.1, 1.0, 5)
    return tanager.GaussianNoise(mechanism, 1.0, seed, params, tanager.Ledger())


class HasTx:
    tx = optax.sgd(0.1)


needs_value = "needs 'value' besides the gradient, which would reveal private examples"

REFUSED = {
    "not called": (optax.sgd, "optimizer (of type function) must be an optax transfo"),
    "none": (None, "optimizer (of type NoneType) must be an optax transformation:"),
    "of flax": (HasTx(), "must be an optax transformation: give its `tx`"),
    "lbfgs": (optax.lbfgs(), "needs 'value', 'grad', and 'value_fn' besides the grad"),
    "polyak": (optax.polyak_sgd(), needs_value),
    "plateau": (optax.contrib.reduce_on_plateau(), needs_value),
    "lookahead": (optax.lookahead(optax.sgd(0.1), 5, 0.5), "fails on these parameters"),
    "labels": (
        optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"}),
        "fails on these parameters (ValueError: ",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_cannot_work_is_refused(name, tmp_path):
    optimizer, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path / "run", optimizer=optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: optax.contrib.dpsgd(0.1, 1.0, 1.0, 0),
        aggregate,
        lambda: optax.masked(aggregate(), {"w": True}),
        lambda: optax.chain(tanager.gaussian_noise(noise()), optax.sgd(0.1)),
    ],
)
def test_an_optimizer_that_privatises_is_refused(optimizer):
    with pytest.raises(ValueError, match="tanager already clips and adds noise"):
        check_optimizer(optimizer(), {"w": jnp.zeros((3, 2))})


@pytest.mark.parametrize(
    ("update", "what"),
    [
        (lambda g, s, p=None: ({"w": jnp.zeros((3, 2))}, s), "the parameters"),
        (lambda g, s, p=None: (g, jnp.zeros(5)), "its own state"),
        (lambda g, s, p=None: (g, s.astype(jnp.int32)), "its own state"),
    ],
)
def test_an_optimizer_that_changes_shapes_is_refused(update, what):
    optimizer = optax.GradientTransformation(lambda params: jnp.zeros(4), update)
    with pytest.raises(ValueError, match=f"changes the shapes or types of {what}"):
        check_optimizer(optimizer, {"w": jnp.zeros((1, 2))})


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(optax.linear_schedule(1.0, 0.0, 5), momentum=0.9),
        optax.adamw(0.1),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1)),
        optax.contrib.schedule_free_sgd(),
    ],
)
def test_an_optimizer_that_works_passes(optimizer):
    with jax.numpy_dtype_promotion("standard"):  # some of optax need it
        check_optimizer(optimizer, first_params())


def labelled(**changed):
    images = np.ones((5, 2, 2, 1), np.float32)
    data = {"image": images, "label": np.array([0, 1, 2, 1, 0])}
    for name, (row, value) in changed.items():
        data[name][row] = value
    return ArraySource(data)


def classifying():
    classes = ("a", "b", "c")
    return Classification(lambda params, example: params, labelled(), classes)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_images_that_are_not_finite_are_counted_and_refused(number):
    source = labelled(image=(slice(1, 4), number))
    message = "data['image'] (=float32[5, 2, 2, 1]) has NaN or infinity in 3 of 5 exam"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_examples(source, None)
    with pytest.raises(ValueError, match="in 1 of 2 examples"):
        check_examples(subset(source, [0, 1]), None)
    check_examples(subset(source, [0, 4]), None)


def test_what_a_loss_may_mask_is_left_to_it():
    data = labelled().tree | {"target": np.full((5, 2, 2), np.nan, np.float32)}
    check_examples(ArraySource(data), classifying())
    narrow = data | {"image": np.full((5, 2, 2, 1), np.nan, jnp.bfloat16)}
    with pytest.raises(ValueError, match="has NaN or infinity in 5 of 5 examples"):
        check_examples(ArraySource(narrow), classifying())


@pytest.mark.parametrize("label", [-1, 3])
def test_training_labels_of_no_class_are_counted_and_refused(label):
    source = labelled(label=([1, 4], label))
    with pytest.raises(ValueError, match="names no class in 2 of 5 examples: number"):
        check_examples(source, classifying())
    check_examples(source, None)
    check_examples(labelled(), classifying())


def test_a_run_checks_its_examples_before_it_is_made(tmp_path):
    data = {
        "x": np.full((20, 3, 1, 1), np.nan, np.float32),
        "y": np.zeros(20, np.int32),
    }
    with pytest.raises(ValueError, match="has NaN or infinity in 20 of 20 examples"):
        run(tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_initial_parameters_must_be_finite(number, tmp_path):
    message = rf"params\['w'\] \(={number}\) must be finite"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", params=with_a(number))
    assert not (tmp_path / "run").exists()


def test_fixed_parameters_may_be_infinite_but_not_nan():
    check_parameters(first_params(), with_a(-np.inf) | {"depth": 3})
    with pytest.raises(ValueError, match=r"params\['w'\] \(=nan\) must be finite"):
        check_parameters(first_params(), with_a(np.nan))


MASKED = np.ma.masked_equal(np.zeros(3, np.float32), 0)


@pytest.mark.filterwarnings("ignore:this run is NOT PRIVATE")
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (0.5, "params['more'] (=0.5) must be an array: write jnp.asarray(0.5) to"),
        (MASKED, "params['more'] (of type MaskedArray) must have no mask: fill it"),
    ],
    ids=["float", "masked"],
)
def test_leaves_that_would_be_ignored_or_misread(tmp_path, leaf, message, private):
    changes = {} if private else {"mechanism": Mechanism(0.4, 0, 3), "clip_norm": None}
    params = first_params() | {"more": leaf}
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path / "run", params=params, **changes)
    assert not (tmp_path / "run").exists()


def test_parameters_of_float64_become_float32():
    wide = {name: np.asarray(leaf, float) for name, leaf in first_params().items()}
    result = run(params=wide, mechanism=Mechanism(0.4, 1, 1), evaluate=None)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.params)} == {jnp.dtype("f4")}


def test_several_hosts_need_a_folder_and_an_example_each(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(ValueError, match=r"out .* must be given on several hosts"):
        run()
    message = re.escape("hosts (=2) must be at most the number of examples")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", data=examples(1))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["jax_debug_nans", "jax_debug_infs"])
def test_settings_by_which_an_example_stops_a_run_are_refused(name, tmp_path):
    setting = jax.debug_nans if name == "jax_debug_nans" else jax.debug_infs
    with setting(True), pytest.raises(ValueError, match=f"{name} .*must be off"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_arithmetic_of_finite_numbers_alone_is_refused(tmp_path, monkeypatch):
    def refuses():
        raise ValueError("a NaN would be a number")

    monkeypatch.setattr("tanager.clipping.transform.require_nans", refuses)
    with pytest.raises(ValueError, match="a NaN would be a number"):
        run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["evaluate", "finish"])
def test_a_function_that_fails_does_so_before_the_first_charge(tmp_path, name):
    def fails(params):
        raise ZeroDivisionError("no test examples")

    message = f"{name} fails before the next step (ZeroDivisionError: no test examples)"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path / "run", **{name: fails})
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == b""


def test_evaluate_must_return_an_evaluation(tmp_path):
    with pytest.raises(ValueError, match=r"\(of type float\) must be an Evaluation"):
        run(tmp_path / "run", evaluate=lambda params: 0.5)
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == b""


def test_a_complete_run_does_not_evaluate_once_more(tmp_path):
    run(tmp_path / "run", evaluate=None)
    calls = []

    def counted(params):
        calls.append(params)
        return Evaluation(0.5, 1.0, ())

    run(tmp_path / "run", evaluate=counted)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 0.02}, r"delta \(0.02\) is not below 1/N \(0.0167\)"),
        ({"mechanism": Mechanism(0.01, 1.2, 3)}, "size is 0.6, below one example"),
    ],
    ids=["a large delta", "a batch of less than one example"],
)
def test_settings_that_protect_or_learn_little_are_warned_of(changes, message):
    """Before the first step, which this evaluation prevents."""
    with (
        pytest.warns(UserWarning, match=message),
        pytest.raises(ValueError, match="must be an Evaluation"),
    ):
        run(evaluate=lambda params: 0.5, **changes)


@pytest.mark.parametrize(
    ("broken", "doubt"),
    [
        (lambda p, e: loss(p, e) * jnp.inf, "were dropped"),
        (lambda p, e: 0.0 * jnp.sum(p["w"]), "had a norm below 0.001"),
        (loss, ""),
    ],
)
def test_a_run_that_learns_nothing_says_so_in_private_alone(
    tmp_path, capfd, broken, doubt
):
    """What depends on the examples is never printed."""
    run(tmp_path / "run", loss=broken, progress=True, evaluate=None)
    text = (tmp_path / "run/private/warnings.txt").read_text()
    assert doubt in text
    assert bool(text) == bool(doubt)
    printed = capfd.readouterr()
    assert "dropped" not in printed.out + printed.err
    assert printed.err == ""


def test_doubts_go_with_the_first_usable_example():
    assert doubts(examples=0, dropped=0, flat=0) == ""
    assert "All 4 examples" in doubts(examples=4, dropped=4, flat=0)
    assert doubts(examples=5, dropped=4, flat=0) == ""
