"""tanager computes what others compute: the same clipped sum, the same ε."""

import json

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import tanager
from scripts import ROOT, load
from tanager.clipping import STRATEGIES
from tanager.models.small import MLP


REFERENCES = ROOT / "tests/privacy/references"
OPACUS = json.loads((REFERENCES / "opacus_epsilons.json").read_text())
CLIP_NORM = 1.7


def clipped_sum_by_hand(weights, biases, images, labels, clip_norm):
    """DP-SGD's sum for a ReLU network and cross-entropy, example by example.

    Backpropagation written out in NumPy, in float64: no library has a part in it.
    Returns the sum, as weights and biases, and the norms before clipping.
    """
    total = [np.zeros_like(w) for w in weights], [np.zeros_like(b) for b in biases]
    norms = []
    for image, label in zip(images, labels, strict=True):
        inputs, values = [], image
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            inputs.append(values)
            values = values @ weight + bias
            if layer < len(weights) - 1:
                values = np.maximum(values, 0)
        probabilities = np.exp(values - values.max())
        error = probabilities / probabilities.sum()
        error[label] -= 1
        gradients = []
        for layer in reversed(range(len(weights))):
            gradients.append((np.outer(inputs[layer], error), error))
            error = (weights[layer] @ error) * (inputs[layer] > 0)
        gradients = gradients[::-1]
        squares = sum((w**2).sum() + (b**2).sum() for w, b in gradients)
        norms.append(np.sqrt(squares))
        factor = min(1.0, clip_norm / norms[-1])
        for layer, (weight, bias) in enumerate(gradients):
            total[0][layer] += factor * weight
            total[1][layer] += factor * bias
    return total, np.array(norms)


def loss(model, example):
    logits = model(example["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_clipped_sum_is_that_of_backpropagation_by_hand(strategy):
    model = MLP(4, (9,), hidden=(8, 6), key=jax.random.key(3))
    generator = np.random.default_rng(3)
    images = generator.normal(size=(24, 9)).astype(np.float32)
    labels = generator.integers(4, size=24, dtype=np.int32)
    layers = [*model.hidden, model.head]
    (weights, biases), norms = clipped_sum_by_hand(
        [np.asarray(layer.weight, np.float64) for layer in layers],
        [np.asarray(layer.bias, np.float64) for layer in layers],
        images.astype(np.float64),
        labels,
        CLIP_NORM,
    )
    assert (norms < CLIP_NORM).any()
    assert (norms > CLIP_NORM).any()
    grad_fn = tanager.clipped_grad(loss, clip_norm=CLIP_NORM, strategy=strategy)
    batch = {"x": jnp.asarray(images), "y": jnp.asarray(labels)}
    found = grad_fn(model, batch, jnp.ones(24, bool))
    assert_allclose(found.norms, norms, rtol=2e-6)
    for layer, weight, bias in zip(
        [*found.sum.hidden, found.sum.head], weights, biases, strict=True
    ):
        # Norms are rounded up, by less than 2e-6 here, and the sums with them.
        assert_allclose(layer.weight, weight, rtol=2e-6, atol=2e-6)
        assert_allclose(layer.bias, bias, rtol=2e-6, atol=2e-6)


def mechanism_of(row):
    return tanager.Mechanism(
        row["sample_rate"], row["noise_multiplier"], steps=row["steps"]
    )


@pytest.mark.parametrize("row", OPACUS, ids=lambda row: f"sigma-{row['steps']}")
def test_epsilon_is_that_of_opacus_and_of_dp_accounting(row):
    """The second as jax-privacy uses it."""
    ours = {
        name: tanager.epsilon(mechanism_of(row), row["delta"], accountant=name)
        for name in ("rdp", "pld")
    }
    # Both minimise over Rényi orders, each over a grid of its own.
    assert ours["rdp"] == pytest.approx(row["rdp"], rel=2e-3)
    # Opacus tells the upper end of an interval that it keeps within 0.01 of ε.
    assert row["prv"] - 0.011 < ours["pld"] < row["prv"] + 1e-3
    gaussian = dp_accounting.GaussianDpEvent(row["noise_multiplier"])
    step = dp_accounting.PoissonSampledDpEvent(row["sample_rate"], gaussian)
    for name, accountant in (
        ("rdp", dp_accounting.rdp.RdpAccountant()),
        ("pld", dp_accounting.pld.PLDAccountant()),
    ):
        accountant.compose(step, row["steps"])
        theirs = accountant.get_epsilon(row["delta"])
        assert ours[name] == pytest.approx(theirs, rel=2e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("system", ["opacus:hooks", "opacus:ghost", "jax-privacy"])
def test_the_clipped_sum_is_that_of_the_peer_itself(system, tmp_path):
    """The same parameters and examples in the peer's environment and here."""
    run = load("benchmarks/peers/run.py")
    workers = load("benchmarks/peers/workers.py")
    name = workers.ENVIRONMENTS[system.split(":")[0]]
    if not (ROOT / f".venv-{name}/bin/python").exists():
        pytest.skip(f"`make bench-peers` lays .venv-{name}")
    work = run.lay_out("mlp", 4, 4, tmp_path) | {"precision": "float32"}
    sums = {}
    for one in (system, "tanager:auto", "jax-vmap"):
        process = workers.Process(one, {})
        process.ask("prepare", system=one, work=work)
        process.ask("sum", to=str(tmp_path / "sum.npz"))
        process.end()
        with np.load(tmp_path / "sum.npz") as found:
            sums[one] = dict(found)
    assert sums[system].keys() == sums["tanager:auto"].keys()
    # Both differ from the definition, and in opposite ways: norms are rounded up here.
    for one in (system, "tanager:auto"):
        assert run.relative(sums[one], sums["jax-vmap"]) < 1e-4, one
