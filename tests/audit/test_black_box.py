"""The black-box audit of one run: what the trained model alone gives away."""

import json

import bugs
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parts import parts
from tanager.audit.black_box import audit_one_run
from tanager.privacy.mechanism import Adjacency, Mechanism


CLAIMED = Mechanism(0.2, 0.6, 40)
WIDTH = 200


def loss(params, example):
    x, y = example
    return jnp.sqrt(1 + (jnp.dot(params, x) - y) ** 2)


@pytest.fixture(scope="module")
def examples():
    """Least squares whose canaries lie on coordinates of their own, nearly."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, WIDTH)).astype(np.float32) / 20
    canaries = np.eye(WIDTH, dtype=np.float32)[:120], np.full(120, 9, np.float32)
    return (x, x.sum(1)), canaries


@pytest.fixture(scope="module")
def one_run(examples):
    def audit(data=examples[0], canaries=examples[1], mechanism=CLAIMED, **options):
        options = {"seed": 1, "strategy": "bk", "physical_batch_size": 32} | options
        options = {"optimizer": optax.sgd(0.5), "guessed": 0.3} | options
        options = {"delta": 1e-4, "confidence": 0.95} | options
        options |= {"loss": loss, "params": jnp.zeros(WIDTH), "mechanism": mechanism}
        problem, algorithm, runtime, rest = parts({"data": data} | options)
        return audit_one_run(problem, algorithm, canaries, runtime, **rest)

    return audit


@pytest.fixture(scope="module")
def found(one_run):
    return one_run()


def test_bounds_are_between_nothing_and_the_claim(found):
    assert len(found.inside) + len(found.outside) == 120
    assert found.guesses.made == 36
    assert 0.8 < found.auc < 1
    assert 0.3 < found.epsilon_lower_bound < found.trade_off_bound
    assert found.trade_off_bound < found.claimed_epsilon
    assert not found.violated


def test_it_goes_on_and_can_be_repeated(one_run, found, tmp_path):
    for _ in range(2):
        again = one_run(out=tmp_path / "run")
        np.testing.assert_array_equal(found.inside, again.inside)
    # How many canaries joined is a secret, which the public size must not tell.
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["examples"] == 40 + 120 // 2 != 40 + len(found.inside)
    with pytest.raises(ValueError, match="clip_norm"):
        one_run(out=tmp_path / "run", clip_norm=2.0)


def test_examples_that_are_read_one_by_one_are_joined_too(one_run, found, examples):
    data = examples[0]

    class OneByOne:
        def __len__(self):
            return len(data[0])

        def __getitem__(self, index):
            return tuple(leaf[index] for leaf in data)

    again = one_run(data=OneByOne())
    np.testing.assert_allclose(found.inside, again.inside, rtol=1e-4, atol=1e-4)


def test_without_noise_it_says_so(one_run, monkeypatch):
    bugs.no_noise(monkeypatch)
    claimed = Mechanism(0.2, 5.0, 40)
    found = one_run(mechanism=claimed)
    assert found.claimed_epsilon < 2
    assert found.violated


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guessed": 0.0}, r"guessed \(=0.0\)"),
        ({"delta": 0.1}, r"canaries \(=120\) prove nothing .* all 36 guesses"),
        ({"guessed": 0.02}, r"canaries \(=120\) .*: at least 250 could; or use"),
        ({"confidence": 1.5}, r"confidence \(=1.5\)"),
        ({"mechanism": Mechanism(0.2, 0.0, 4)}, r"noise_multiplier \(=0\) claims"),
        (
            {"mechanism": Mechanism(0.2, 1.0, 4, Adjacency.REPLACE_ONE)},
            "cannot be tested by canaries that join the data",
        ),
        ({"canaries": (np.eye(3, 4), np.ones(3))}, r"canaries \(=3\)"),
        (
            {"canaries": (np.ones((30, 4), np.float32), np.ones(30, np.float32))},
            r"canaries .* must be like an example",
        ),
    ],
)
def test_bad_input_is_refused(one_run, options, message):
    with pytest.raises(ValueError, match=message):
        one_run(**options)
