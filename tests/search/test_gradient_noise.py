"""Sampling noise from the norms of a run, against batches of other examples."""

import numpy as np
import pytest

from scripts import load
from tanager.data import as_source, gather
from tanager.data import load as load_data


@pytest.fixture(scope="module")
def script():
    return load("benchmarks/gradient_noise.py")


def of_one_class(source):
    """Their gradients are alike, so that most of a sum's variance is its length's."""
    examples = gather(source, np.arange(len(source)))
    return as_source({**examples, "label": np.zeros_like(examples["label"])})


@pytest.mark.slow
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("network", "clip_norm", "alike"),
    [
        ("small-cnn", 20.0, 0.35),
        pytest.param("wrn-10-1", 25.0, 0, marks=pytest.mark.full),
        pytest.param("ViT", 60.0, 0.5, marks=pytest.mark.full),
    ],
)
def test_a_run_predicts_the_variance_of_other_batches(
    script, network, clip_norm, alike
):
    """False-alarm rate: 1e-5, of five standard errors in nine comparisons.

    The middles of bins may be off by 3 % of the mean besides.
    """
    [create] = [make for name, make in script.NETWORKS.items() if network in name]
    digits = load_data("digits")
    model, held = create(digits.image_shape), of_one_class(digits.test)
    _, norms = script.run(
        model, of_one_class(digits.train), 64, clip_norm, steps=20, learning_rate=0.0
    )
    predicted = norms.mean_square()
    assert 0.6 < predicted < 0.97
    gradients = script.clipped(model, held, clip_norm) / clip_norm
    squares = np.sum(gradients**2, axis=1)
    assert np.sum(gradients.mean(axis=0) ** 2) > alike * squares.mean()
    # Both means are of a few examples: about 1000 in the run.
    of_means = np.var(squares) * (1 / len(squares) + 1 / 1000)
    for batch_size in (16, 64, 256):
        bound = batch_size * (1 - batch_size / len(held))
        found, error = script.variance(gradients, batch_size, 1000)
        errors = 5 * float(np.hypot(error / bound, np.sqrt(of_means)))
        assert errors < 0.2 * predicted
        assert found / bound == pytest.approx(
            predicted, abs=errors + 0.03 * predicted
        ), batch_size
