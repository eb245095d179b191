"""Adaptive clipping: its sensitivity, its accounting, its rule, and runs with it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

import tanager
from cases import in_full
from parts import step, train
from tanager.adaptive import AdaptiveClipping
from tanager.clipping.planning.choices import STRATEGIES
from trees import distance


MECHANISM = tanager.Mechanism(sample_rate=0.5, noise_multiplier=1.2, steps=30)
N, D = 40, 6
RNG = np.random.default_rng(0)
DATA = RNG.normal(size=(N, D)).astype(np.float32) * np.geomspace(0.1, 10, N)[:, None]
DATA = DATA.astype(np.float32)


def loss(w, x):
    return w @ x  # whose gradient is x


def clip_of(mechanism=MECHANISM, clip_norm=1.0, batch_size=N / 2, **options):
    grad_fn = tanager.clipped_grad(loss, clip_norm=clip_norm, style="unit")
    return grad_fn, AdaptiveClipping(**options).of(grad_fn, mechanism, batch_size)


def flat(tree):
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves).astype(np.float64)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_an_example_moves_both_by_at_most_the_sensitivity(strategy):
    grad_fn = tanager.clipped_grad(loss, clip_norm=1.0, style="unit", strategy=strategy)
    clip = AdaptiveClipping(count_noise=1.2).of(grad_fn, MECHANISM, N / 2)
    assert clip.weight == 1.0  # a count that counts
    w, reached = jnp.zeros(D), []

    @jax.jit
    def sums(data, mask, norm):
        return clip(w, data, mask, norm)[1].sum

    for norm in (1e-3, 0.1, 1.0, 7.3, 100.0):
        every = np.ones(N, bool)
        whole = sums(DATA, every, norm)
        for row in range(0, N, 5):
            mask = np.arange(N) != row
            moved = distance(whole, sums(DATA, mask, norm))
            assert moved <= clip.sensitivity
            reached.append(moved)
            other = DATA.copy()
            other[row] *= -(10.0 ** RNG.integers(-4, 4))
            replaced = distance(whole, sums(other, every, norm))
            assert replaced <= 2 * clip.sensitivity
    assert max(reached) > 0.999 * math.hypot(1, 0.5)


@given(
    sigma=st.floats(0.3, 20),
    batch=st.floats(1, 1e5),
    share=st.floats(1, 300) | st.none(),
)
@settings(max_examples=50, deadline=None)
def test_one_mechanism_is_what_gradients_and_count_spend(sigma, batch, share):
    """Theorem 1 of Andrew et al.: z⁻² = z_Δ⁻² + (2σ_b)⁻²."""
    mechanism = tanager.Mechanism(1.0, sigma, 1)
    asked = None if share is None else share * sigma
    grad_fn, clip = clip_of(mechanism, batch_size=batch, count_noise=asked)
    params = clip.released(jnp.zeros(D))
    seed = tanager.Seed.from_int(0)
    noise = tanager.GaussianNoise(mechanism, clip.sensitivity, seed, params)
    own = noise.standard_deviation / grad_fn.sensitivity
    count = noise.standard_deviation / clip.weight
    assert own**-2 + (2 * count) ** -2 <= sigma**-2  # more, for rounding
    assert own**-2 + (2 * count) ** -2 == pytest.approx(sigma**-2, rel=1e-3)
    if asked is None:
        asked = max(batch / 20, 5 * sigma)
        assert own < 1.003 * sigma
    assert asked * (1 - 1e-6) <= count <= 2.01 * asked


def test_the_accountant_of_both_releases_agrees():
    """Composed by dp_accounting, of sensitivities 1 and ½."""
    _, clip = clip_of(count_noise=2.0)
    sigma = MECHANISM.noise_multiplier
    own = sigma * clip.sensitivity
    parts: list[DpEvent] = [
        GaussianDpEvent(own),
        GaussianDpEvent(2 * own / clip.weight),
    ]
    both = PLDAccountant().compose(ComposedDpEvent(parts)).get_epsilon(1e-5)
    one = PLDAccountant().compose(GaussianDpEvent(sigma)).get_epsilon(1e-5)
    assert both == pytest.approx(one, rel=2e-3)


def test_padding_and_rows_that_are_not_finite_count_nothing():
    _, clip = clip_of()
    data = np.array([[0.5] * D, [3.0] * D, [3.0] * D, [np.nan] * D, [1e30] * D])
    data = data.astype(np.float32) / np.sqrt(D)
    four = np.array([True, True, True, True, False])
    for mask, expected in ((four, -0.5), (None, -0.5), (~four, 0)):
        _, sums = clip(jnp.zeros(D), data, mask, 1.0)
        assert float(sums.sum[1]) == expected * clip.weight


def test_gradients_are_clipped_to_the_norm_of_the_call():
    grad_fn, clip = clip_of()
    w = jnp.zeros(D)
    found = clip(w, DATA, None, 0.2)[1].sum[0]
    np.testing.assert_array_equal(found, grad_fn(w, DATA, clip_norm=0.2).sum)
    assert distance(found, grad_fn(w, DATA).sum) > 1


@pytest.mark.parametrize("count", [-20.0, -3.0, 0.0, 5.5, 20.0])
def test_the_rule_is_the_papers(count):
    _, clip = clip_of(quantile=0.3, learning_rate=0.7)
    share = count / (N / 2) + 0.5
    expected = 2.5 * math.exp(-0.7 * (share - 0.3))
    found = clip.next(2.5, clip.weight * count)
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("count", "limit"), [(1e30, 2e-12), (-1e30, 5e11)])
def test_whatever_the_noise_the_norm_stays_one_that_clips(count, limit):
    grad_fn, clip = clip_of()
    norm = clip.next(1.0, count)
    assert float(norm) == pytest.approx(limit)
    out = grad_fn(jnp.zeros(D), DATA, clip_norm=norm)
    assert np.isfinite(flat(out.sum)).all()
    assert np.abs(flat(out.sum)).max() > 0


def test_the_norm_follows_where_transfers_are_refused():
    _, clip = clip_of()
    w, data = jnp.zeros(D), jnp.asarray(DATA)
    with jax.transfer_guard("disallow"):
        count = clip(w, data, None, clip.first)[1].sum[1]
        clip(w, data, None, clip.next(clip.first, count))


def options_of(**options):
    own = {"loss": loss, "params": jnp.zeros(D), "data": (DATA,)}
    own |= {"loss": lambda w, example: loss(w, example[0]), "mechanism": MECHANISM}
    own |= {"adaptive": AdaptiveClipping(), "seed": 1, "physical_batch_size": 16}
    return own | {"strategy": "bk", "evaluate_every": 1} | options


def followed(**options):
    lines: list[Any] = []
    result = train(**options_of(on_metrics=lines.append, **options))
    return result, [line["clip_norm"] for line in lines]


@pytest.mark.filterwarnings("ignore:.*not private")
@pytest.mark.parametrize("quantile", in_full([0.2, 0.5, 0.9], 0.5))
def test_the_norm_reaches_the_quantile_of_the_norms(quantile):
    still = tanager.Mechanism(1.0, 0.0, 150)
    adaptive = AdaptiveClipping(quantile)
    _, norms = followed(mechanism=still, adaptive=adaptive, clip_norm=0.01)
    share = np.mean(np.linalg.norm(DATA, axis=1) <= norms[-1])
    assert abs(share - quantile) <= 1.5 / N


def test_neither_physical_batches_nor_a_resume_change_a_run(tmp_path):
    whole, norms = followed()
    small, same = followed(physical_batch_size=4)
    assert norms == same
    np.testing.assert_allclose(whole.params, small.params, atol=2e-5)
    assert len(set(norms)) > 20

    def stop(line):
        if line["step"] == 11:
            raise KeyboardInterrupt

    kept = {"out": tmp_path / "run", "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        train(**options_of(on_metrics=stop, **kept))
    again, rest = followed(**kept)
    assert rest == norms[-len(rest) :]
    assert 1 < len(rest) < len(norms)
    np.testing.assert_array_equal(again.params, whole.params)


def test_a_resume_with_other_settings_is_refused(tmp_path):
    train(**options_of(out=tmp_path))
    for other in (None, AdaptiveClipping(0.4), AdaptiveClipping(count_noise=7.0)):
        with pytest.raises(ValueError, match="adaptive_clipping"):
            train(**options_of(out=tmp_path, adaptive=other))


STEP = {"mechanism": MECHANISM, "adaptive": AdaptiveClipping(), "examples": N}


def test_the_step_claims_and_releases_what_the_object_says():
    made = step(loss=loss, params=jnp.zeros(D), **STEP)
    clip = made.adaptive
    assert clip is not None
    assert made.noise is not None
    deviation = clip.sensitivity + made.noise.grid.rounding
    expected = MECHANISM.noise_multiplier * deviation
    assert made.noise.standard_deviation == pytest.approx(expected, rel=1e-12)
    assert made.noise.grid.coordinates == D + 1


def test_a_loop_of_ones_own(tmp_path):
    _, clip = clip_of()
    seed = tanager.Seed.from_int(3)
    sampler = tanager.PoissonSampler(MECHANISM, N, seed)
    params = jnp.zeros(D)
    with tanager.Ledger(tmp_path / "ledger.jsonl") as ledger:
        shapes = clip.released(params)
        noise = tanager.GaussianNoise(MECHANISM, clip.sensitivity, seed, shapes, ledger)

        @jax.jit
        def update(params, norm, total, number):
            gradient, count = noise(total, number)
            params = params - 0.1 * gradient / sampler.expected_batch_size
            return params, clip.next(norm, count)

        @jax.jit
        def add(params, norm, total, mask, indices):
            _, sums = clip(params, jnp.asarray(DATA)[indices], mask, norm)
            return noise.grid.add(total, sums)

        norm = jnp.float32(clip.first)
        for number in range(MECHANISM.steps):
            total = noise.zeros()
            for part in sampler.batches(number, 8):
                total = add(params, norm, total, part.mask, part.indices)
            params, norm = jax.block_until_ready(update(params, norm, total, number))
        assert sum(one.steps for one in ledger.mechanisms()) == MECHANISM.steps
    expected = followed(seed=3, optimizer=optax.sgd(0.1), physical_batch_size=8)
    np.testing.assert_allclose(norm, expected[1][-1], rtol=1e-5)
    np.testing.assert_allclose(params, expected[0].params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bug", ["other sensitivity", "scaled"])
def test_a_sum_that_the_noise_is_not_for_is_refused(bug):
    grad_fn, clip = clip_of()
    own = grad_fn.sensitivity if bug == "other sensitivity" else clip.sensitivity
    shapes, seed = clip.released(jnp.zeros(D)), tanager.Seed.from_int(0)
    noise = tanager.GaussianNoise(MECHANISM, own, seed, shapes)
    _, sums = clip(jnp.zeros(D), DATA, None, 1.0)
    if bug == "scaled":
        sums = jax.tree.map(lambda leaf: 2 * leaf, sums)
    with pytest.raises(ValueError, match="a larger norm than the noise is for"):
        noise(noise.grid.add(noise.zeros(), sums), 0)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"quantile": 0.0}, "quantile"),
        ({"quantile": 1.0}, "quantile"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": 3.0}, "learning_rate"),
        ({"count_noise": -1.0}, "count_noise"),
        ({"count_noise": 1.0}, "count_noise"),  # below the noise multiplier
        ({"batch_size": 0.0}, "batch_size"),
        ({"clip_norm": {"a": 1.0}}, "clip_norm"),
    ],
)
def test_what_has_no_meaning_is_refused(options, name):
    with pytest.raises(ValueError, match=f"^{name} "):
        clip_of(**options)


def test_only_sums_in_units_of_the_norm_can_follow_it():
    grad_fn = tanager.clipped_grad(loss, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"^style .*unit"):
        AdaptiveClipping().of(grad_fn, MECHANISM, N / 2)


@pytest.mark.parametrize("other", [{"style": "automatic"}, {"clip_norm": None}])
def test_an_algorithm_that_clips_otherwise_does_not_follow(other):
    with pytest.raises(ValueError, match=r"^adaptive "):
        tanager.DPSGD(
            MECHANISM,
            optax.sgd(0.1),
            delta=1e-3,
            adaptive=AdaptiveClipping(),
            **other,
        )
