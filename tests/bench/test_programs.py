import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tanager.bench import programs
from tanager.bench.workload import Workload


ROWS, FEATURES, CLASSES, C = 5, 6, 3, 0.7
WORKLOAD = Workload("linear", (FEATURES,), classes=CLASSES, clip_norm=C)
MASK = np.array([True, False, True, True, False])


def _outcome(program, mask=MASK, poison=False):
    batch = WORKLOAD.batch(ROWS)
    if poison:
        padding = jnp.asarray(~mask)[:, None]
        batch["image"] = jnp.where(padding, jnp.nan, batch["image"])
    program.prepare(WORKLOAD.params(), batch)
    program.run(jnp.asarray(mask))
    return program._carried


def _gradients():
    """Return weights, per-example gradients and losses, by hand in float64."""
    params, batch = WORKLOAD.params(), WORKLOAD.batch(ROWS)
    weight = np.asarray(params.head.weight, np.float64)
    images = np.asarray(batch["image"], np.float64)
    labels = np.asarray(batch["label"])
    logits = images @ weight + np.asarray(params.head.bias, np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    losses = -np.log(probabilities[np.arange(ROWS), labels])
    errors = probabilities - np.eye(CLASSES)[labels]
    gradients = np.einsum("bi,bo->bio", images, errors)
    norms = np.sqrt((gradients**2).sum(axis=(1, 2)) + (errors**2).sum(axis=1))
    return weight, gradients, norms, losses


def test_sgd_is_one_step_on_the_mean_over_examples():
    weight, gradients, _, _ = _gradients()
    expected = weight - 0.1 * gradients[MASK].mean(axis=0)
    params, _ = _outcome(programs.sgd(WORKLOAD))
    np.testing.assert_allclose(params.head.weight, expected, atol=1e-6)


def test_clipping_adds_the_clipped_gradients_of_examples_only():
    _, gradients, norms, _ = _gradients()
    assert (norms > C).any()
    factors = np.minimum(1, C / norms) * MASK
    expected = np.einsum("b,bio->io", factors, gradients)
    program = programs.training(WORKLOAD, "per_example")
    accumulator = _outcome(program, poison=True)
    hide = WORKLOAD.step("per_example").noise
    assert hide is not None
    grid, params = hide.grid, WORKLOAD.params()
    found = grid.floats(accumulator.sum, params).head.weight[0]
    np.testing.assert_allclose(found, expected, atol=grid.spacing)
    assert int(accumulator.counts.examples[0]) == MASK.sum()
    program.run(jnp.asarray(MASK))
    total = grid.floats(program._carried.sum, params).head.weight[0]
    np.testing.assert_allclose(total, 2 * expected, atol=2 * grid.spacing)


def test_the_prefixes_are_the_mean_loss_and_its_gradient():
    _, gradients, _, losses = _gradients()
    mean = float(_outcome(programs.forward(WORKLOAD)))
    assert mean == pytest.approx(losses[MASK].mean(), rel=1e-5)
    found = _outcome(programs.gradient(WORKLOAD)).head.weight
    np.testing.assert_allclose(found, gradients[MASK].mean(axis=0), atol=1e-6)


def test_the_update_moves_parameters_by_noise():
    state = _outcome(programs.update(WORKLOAD))
    before = WORKLOAD.params().head.weight
    assert np.isfinite(state.params.head.weight).all()
    assert not np.array_equal(state.params.head.weight, before)


def test_masks_have_all_sizes_first_and_then_one():
    warm_up, timed = programs.masks(ROWS, 3)
    assert [int(mask.sum()) for mask in warm_up] == [5, 0, 3]
    assert [int(mask.sum()) for mask in timed] == [3, 3, 3]
    assert len({tuple(np.asarray(mask).tolist()) for mask in warm_up + timed}) == 6


@pytest.mark.parametrize(
    "name", ["sgd", pytest.param("per_example", marks=pytest.mark.full), "auto:low"]
)
def test_a_call_needs_its_arguments_at_least_and_more_with_more_rows(name):
    program = programs.training(WORKLOAD, name)
    params = 4 * (FEATURES * CLASSES + CLASSES)

    def needed(rows):
        batch = WORKLOAD.batch_shapes(rows)
        return program.bytes_needed(WORKLOAD.param_shapes, batch) or 0

    few, many = needed(8), needed(800)
    assert few >= params + 8 * 4 * FEATURES
    assert many - few >= 792 * 4 * FEATURES


def test_donated_memory_counts_once():
    size = 10_000
    program = programs.Program(
        "planted",
        lambda params, batch: (params, ()),
        lambda carried, inputs, mask: carried + jnp.sum(mask, dtype=jnp.float32),
    )
    carried = jax.ShapeDtypeStruct((size,), jnp.float32)
    batch = jax.ShapeDtypeStruct((4,), jnp.float32)
    needed = program.bytes_needed(carried, batch)
    assert needed is not None
    assert 4 * size <= needed < 1.1 * 4 * size
