"""Noise in compiled programs: the numbers of the host, fresh, never twice."""

import copy
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import tanager
from switch import FULL
from tanager.transformation import gaussian_noise


MECHANISM = tanager.Mechanism(sample_rate=0.1, noise_multiplier=1.5, steps=100)
SEED = tanager.Seed.from_int(0)
PARAMS = {"a": jnp.zeros((30, 20)), "b": jnp.zeros(7), "none": None}
USED = "was used with another sum"


def noise_with(ledger=None, seed=SEED):
    return tanager.GaussianNoise(MECHANISM, 0.8, seed, PARAMS, ledger)


def sums(noise, value=1.0):
    return noise.grid.round(jax.tree.map(lambda leaf: leaf + value, PARAMS))


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def refused(function, *arguments):
    """Run a program that raises; return what it says."""
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as error:
        jax.block_until_ready(function(*arguments))
    return str(error.value)


@pytest.mark.parametrize("traced", ["step", "total", "both"])
def test_a_compiled_program_draws_what_the_host_draws(traced):
    noise, total = noise_with(), sums(noise_with())
    program = {
        "step": jax.jit(lambda total, step: noise(sums(noise), step)),
        "total": lambda total, step: jax.jit(lambda total: noise(total, 3))(total),
        "both": jax.jit(noise),
    }[traced]
    expected = noise.add(total, noise.draw(3))
    equal(program(total, 3), expected)
    equal(program(total, 3), expected)  # the same sum: nothing new is told


def test_each_step_of_a_scan_has_its_own_noise():
    noise, total = noise_with(), sums(noise_with())

    @jax.jit
    def scanned(total):
        return jax.lax.map(lambda step: noise(total, step), jnp.arange(3))

    for step in range(3):
        found = jax.tree.map(lambda leaf, step=step: leaf[step], scanned(total))
        equal(found, noise_with()(total, step))


def optimizer_of(noise) -> Any:
    return optax.chain(
        gaussian_noise(noise), optax.scale(1 / 8), optax.sgd(0.1, momentum=0.9)
    )


@pytest.mark.statistical
def test_an_optimizer_in_a_scan_is_the_loop_by_hand():
    """And its noise has the law of the mechanism; chi-squared, false alarm 1e-6."""
    ledger = tanager.Ledger()
    noise, by_hand, sgd = noise_with(ledger), noise_with(), optax.sgd(0.1, 0.9)
    optimizer = optimizer_of(noise)
    state, expected_state = optimizer.init(PARAMS), sgd.init(PARAMS)

    @jax.jit
    def run(state):
        def update(state, value):
            updates, state = optimizer.update(sums(noise, value), state)
            return state, updates

        return jax.lax.scan(update, state, jnp.arange(4.0))

    state, updates = run(state)
    released = []
    for step in range(4):
        noisy = by_hand(sums(by_hand, float(step)), step)
        released += [leaf - step for leaf in jax.tree.leaves(noisy)]
        mean = jax.tree.map(lambda leaf: leaf / 8, noisy)
        expected, expected_state = sgd.update(mean, expected_state)
        found = jax.tree.map(lambda leaf, step=step: leaf[step], updates)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            found,
            expected,
        )
    assert int(state[0].noise_step) == ledger.steps() == 4
    spent = tanager.epsilon(tanager.Mechanism(0.1, 1.5, 4), 1e-5)
    assert ledger.epsilon(1e-5) == pytest.approx(spent)
    values = np.concatenate([np.ravel(leaf) for leaf in released]).astype(float)
    statistic = np.sum((values / noise.standard_deviation) ** 2)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], values.size)
    assert low < statistic < high


def test_what_a_call_of_clipped_grad_returns_is_one_physical_batch():
    grad_fn = tanager.clipped_grad(
        lambda params, x: jnp.sum(params["a"][0]) * x, clip_norm=0.5
    )
    out = grad_fn(PARAMS, jnp.arange(4.0))
    noise = noise_with(tanager.Ledger())
    transformation = gaussian_noise(noise)
    noisy, _ = jax.jit(transformation.update)(out, transformation.init(PARAMS))
    equal(noisy, noise_with()(noise.grid.round(out.sum), 0))


def test_a_sum_that_was_added_for_other_noise_is_refused():
    large, small = (
        tanager.GaussianNoise(MECHANISM, size, tanager.Seed.from_os(), PARAMS)
        for size in (1.5, 0.8)
    )
    total = sums(large, 1.0)
    assert large.grid.spacing == small.grid.spacing
    for call in (small, jax.jit(small), lambda x, _: small.grid.add(x, PARAMS)):
        with pytest.raises(ValueError, match="must be a sum on this grid"):
            call(total, 0)


PLANTED = {
    "a step fixed at the trace": lambda noise: jax.jit(lambda x: noise(x, 5)),
    "a step that a scan does not count": lambda noise: jax.jit(
        lambda x: jax.lax.map(
            lambda value: noise(sums(noise, value), 5), jnp.arange(2.0)
        )
    ),
    "rows of vmap in one step": lambda noise: jax.vmap(
        lambda value: noise(sums(noise, value), 5)["b"]
    ),
    "a state that is not carried": lambda noise: jax.jit(
        lambda x: gaussian_noise(noise).update(x, gaussian_noise(noise).init(PARAMS))
    ),
    "a loop on the host": lambda noise: lambda x: noise(x, 5),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_noise_that_would_be_used_twice_is_refused(bug):
    noise = noise_with(tanager.Ledger())
    program = PLANTED[bug](noise)
    if "vmap" in bug:
        assert USED in refused(program, jnp.arange(2.0))
    elif "scan" in bug:
        assert USED in refused(program, sums(noise))
    else:
        program(sums(noise, 1.0))
        assert USED in refused(program, sums(noise, 2.0))


def test_another_seed_is_another_stream_and_may_use_a_step_again():
    noise = noise_with(tanager.Ledger())
    other = noise.with_seed(tanager.Seed.from_int(1))
    noise(sums(noise, 1.0), 0)
    other(sums(noise, 2.0), 0)
    assert noise.ledger is not None and noise.ledger.steps() == 2


def test_one_secret_hides_one_sum_a_step_whatever_object_asks():
    """Of two sums with one noise, the difference is known exactly."""
    secret = tanager.Seed(bytes(range(32)))
    ledger = tanager.Ledger()
    first, second = noise_with(ledger, secret), noise_with(tanager.Ledger(), secret)
    copied = copy.deepcopy(first)
    first(sums(first, 1.0), 0)
    equal(second(sums(second, 1.0), 0), first(sums(first, 1.0), 0))
    assert USED in refused(second, sums(second, 2.0), 0)
    assert USED in refused(first.with_seed(secret), sums(second, 2.0), 0)
    assert USED in refused(copied, sums(second, 2.0), 0)
    scaled = tanager.GaussianNoise(MECHANISM, 0.4, secret, PARAMS)
    assert USED in refused(scaled, sums(scaled, 1.0), 0)
    louder = dataclasses.replace(MECHANISM, noise_multiplier=2.0)
    louder = tanager.GaussianNoise(louder, 0.8, secret, PARAMS)
    assert USED in refused(louder, sums(first, 1.0), 0)
    assert ledger.steps() == 1


def test_a_restart_never_uses_a_charged_step(tmp_path):
    noise = noise_with(tanager.Ledger(tmp_path / "ledger.jsonl"))
    optimizer = optimizer_of(noise)
    old = optimizer.init(PARAMS)
    for value in (1.0, 2.0):
        optimizer.update(sums(noise, value), optax.tree.set(old, noise_step=int(value)))
    assert noise.ledger is not None
    noise.ledger.close()
    noise = noise_with(tanager.Ledger(tmp_path / "ledger.jsonl"))
    optimizer = optimizer_of(noise)
    assert noise.first_step == 3
    said = refused(optimizer.update, sums(noise), old)
    assert "step (=0) must be at least 3" in said
    state = optax.tree.set(old, noise_step=noise.first_step)
    optimizer.update(sums(noise), state)
    assert noise.ledger is not None and noise.ledger.next_step() == 4
    equal(optimizer.init(PARAMS)[0], state[0])
    noise.ledger.close()


def test_a_step_is_charged_before_its_noise_is_drawn(monkeypatch):
    ledger = tanager.Ledger()
    noise = noise_with(ledger)
    monkeypatch.setattr(noise, "draw", lambda step: 1 / 0)
    assert "ZeroDivision" in refused(jax.jit(noise), sums(noise), 0)
    assert ledger.steps() == 1


def test_a_step_that_cannot_be_charged_gives_no_result(tmp_path):
    noise = noise_with(tanager.Ledger(tmp_path / "ledger.jsonl"))
    assert noise.ledger is not None
    noise.ledger.close()
    assert "rror" in refused(jax.jit(noise), sums(noise), 0)


def test_the_horizon_holds_in_a_compiled_program():
    noise = noise_with(tanager.Ledger())
    said = refused(jax.jit(noise), sums(noise), 100)
    assert "step (=100) must be below the mechanism's 100 steps" in said
    assert noise.ledger is not None and noise.ledger.steps() == 0


def twice(noise, limb):
    """Two sums, which one draw of noise would be added to."""
    total = sums(noise)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), getattr(total, limb))
    return total._replace(**{limb: both})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda noise: gaussian_noise(noise_with()), "noise must have a ledger"),
        (lambda noise: gaussian_noise(noise.grid), "noise (of type Grid) must"),
        (
            lambda noise: gaussian_noise(noise).init({"a": PARAMS["a"]}),
            "must be (7,), as in the parameters of the noise: make GaussianNoise of "
            "the same pytree",
        ),
        (
            lambda noise: noise.grid.add(PARAMS, PARAMS),
            "total (of type dict) must be a sum: begin with noise.zeros()",
        ),
        (
            lambda noise: noise.grid.add(noise.zeros(), {"a": PARAMS["a"]}),
            "give what clipped_grad returned (with has_aux, the first of two), and "
            "make GaussianNoise of the same pytree",
        ),
        (
            lambda noise: optimizer_of(noise).update(
                PARAMS, optimizer_of(noise).init(PARAMS)
            ),
            "updates (a dict) must be a sum without noise",
        ),
        (lambda noise: noise(sums(noise), 1.5), "step (=1.5) must be a whole number"),
        (
            lambda noise: jax.jit(noise)(sums(noise), 1.5),
            "step (='float32[]') must be one whole number",
        ),
        (
            lambda noise: jax.jit(noise.draw)(3),
            "noise.draw must be called outside jax.jit",
        ),
        *(
            (
                lambda noise, limb=limb: noise(twice(noise, limb), 0),
                "(=(2, 30, 20)) must",
            )
            for limb in ("high", "low")
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_charged(call, message):
    ledger = tanager.Ledger()
    with pytest.raises(ValueError, match=re.escape(message)):
        call(noise_with(ledger))
    assert ledger.steps() == 0


def test_two_devices_get_the_noise_of_one_and_charge_once():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    ledger = tanager.Ledger()
    noise, total = noise_with(ledger), sums(noise_with())
    shares = jax.device_put(total, jax.NamedSharding(mesh, jax.P()))
    equal(jax.jit(noise)(shares, 0), noise_with()(total, 0))
    assert ledger.steps() == 1


def test_nothing_is_transferred_without_a_word():
    noise = noise_with(tanager.Ledger())
    update, total = jax.jit(gaussian_noise(noise).update), sums(noise)
    clipped = clipped_by(noise)
    with jax.transfer_guard("disallow"):
        other, state = noise_with(), gaussian_noise(noise).init(PARAMS)
        other(other.grid.add(other.zeros(), clipped), 0)
        gaussian_noise(noise_with(tanager.Ledger())).update(clipped, state)
        _, state = update(total, state)
        _, state = update(total, state)
        update(clipped, state)


def clipped_by(noise):
    """Return what clipped_grad gives of three rows, for the noise's parameters."""

    def loss(params, row):
        return jnp.sum(params["a"]) * row + jnp.sum(params["b"])

    clip = tanager.clipped_grad(loss, clip_norm=0.79)
    return clip(PARAMS, jnp.arange(3.0))


CHANGES = {
    "a float": lambda tree: optax.scale(1 / 3).update(tree, optax.EmptyState())[0],
    "a whole number": lambda tree: jax.tree.map(lambda leaf: 100 * leaf, tree),
    "two sums": lambda tree: jax.tree.map(jnp.add, tree, tree),
    "signs": lambda tree: jax.tree.map(jnp.sign, tree),
    "rounding": lambda tree: jax.tree.map(jnp.round, tree),
    "sizes": lambda tree: jax.tree.map(jnp.abs, tree),
    "what is positive": lambda tree: jax.tree.map(lambda x: jnp.maximum(x, 0), tree),
    "what is large": lambda tree: jax.tree.map(
        lambda x: jnp.where(jnp.abs(x) < 1e-3, 0, x), tree
    ),
    "a norm of all": lambda tree: optax.clip_by_global_norm(0.5).update(
        tree, optax.EmptyState()
    )[0],
    "an entry": lambda tree: optax.clip(0.5).update(tree, optax.EmptyState())[0],
}


# A sum of two sums on the grid is one; the others have no meaning on it.
NOT_OF_THE_GRID = {"two sums", "signs", "rounding", "sizes"}
NOT_OF_THE_GRID |= {"what is positive", "what is large"}
OF_A_SUM = [
    (kind, name)
    for kind in ("clipped", "on the grid")
    for name in CHANGES
    if kind == "clipped" or name not in NOT_OF_THE_GRID
]


def calls(program, name, argument):
    """Call a program that changes a sum in this way, and some of them compiled.

    Yield what each call says that is refused.
    """
    some = FULL or name in {"a float", "two sums", "what is positive"}
    for called in [program] + [jax.jit(program)] * some:
        with jax.numpy_dtype_promotion("standard"):  # JAX's default
            try:
                yield refused(called, argument)
            except TypeError:  # Optax selects among numbers of one dtype alone
                assert name == "a norm of all"


@pytest.mark.parametrize(("kind", "name"), OF_A_SUM)
def test_a_sum_that_was_changed_before_the_noise_is_refused(kind, name):
    """Its sensitivity is not that of what was clipped, whatever changed it."""
    noise = noise_with(tanager.Ledger())
    transformation = gaussian_noise(noise)
    state = transformation.init(PARAMS)
    given = clipped_by(noise) if kind == "clipped" else sums(noise, 1.3)

    def update(given):
        return transformation.update(CHANGES[name](given), state)

    for said in calls(update, name, given):
        assert "it was scaled or added to since" in said
    assert noise.ledger is not None and noise.ledger.next_step() == 0


def test_a_sum_that_was_made_by_hand_is_refused():
    noise = noise_with(tanager.Ledger())
    transformation = gaussian_noise(noise)
    given = clipped_by(noise)
    larger = given._replace(sum=jax.tree.map(lambda leaf: 9 * leaf, given.sum))
    for tree in (larger, type(given)(*given)):
        with pytest.raises(ValueError, match="sums has no mark of clipped_grad"):
            transformation.update(tree, transformation.init(PARAMS))


def test_what_clipping_gave_is_a_pytree_of_its_three_parts_and_a_mark():
    given = clipped_by(noise_with())
    total, norms, losses = given
    assert norms.shape == losses.shape == (3,)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(given)}
    assert names == {".sum['a']", ".sum['b']", ".norms", ".losses", ".mark"}
    again = jax.jit(lambda tree: tree)(given)
    equal(again.sum, total)
    assert again.mark.tolist() == given.mark.tolist()


def released(noise, change):
    """Return a program that adds a sum that was changed, and one that was not."""

    def release(given):
        total = noise.grid.add(noise.zeros(), change(given))
        return noise(noise.grid.add(total, given), 0)

    return release


@pytest.mark.parametrize("name", CHANGES)
def test_a_sum_that_was_changed_before_it_is_added_is_refused(name):
    """And what is added after it does not hide that."""
    noise = noise_with(tanager.Ledger())
    for said in calls(released(noise, CHANGES[name]), name, clipped_by(noise)):
        assert "it was scaled or added to since" in said
    assert noise.ledger is not None and noise.ledger.next_step() == 0


def test_a_sum_that_was_not_changed_is_added():
    noise, given = noise_with(tanager.Ledger()), clipped_by(noise_with())
    release = released(noise, lambda tree: tree)
    twice = noise.grid.add(noise.grid.add(noise.zeros(), given.sum), given.sum)
    for program in (release, jax.jit(release)):
        equal(program(given), noise_with()(twice, 0))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("call", [False, True])
def test_a_sum_that_was_clipped_to_a_larger_norm_is_refused(call, compiled):
    def loss(params, x):
        return jnp.sum(params["b"]) * x

    def given_by(norm):
        own = tanager.clipped_grad(loss, clip_norm=1.0 if call else norm)
        given = {"clip_norm": norm} if call else {}
        return lambda x: own(PARAMS, x, **given)

    grad_fn = tanager.clipped_grad(loss, clip_norm=1.0)
    sensitivity, ledger = grad_fn.sensitivity, tanager.Ledger()
    noise = tanager.GaussianNoise(MECHANISM, sensitivity, SEED, PARAMS, ledger)
    for step, norm in enumerate((0.5, 1.0, 1.01, 20.0)):
        clipped = given_by(norm)

        def release(x, step=step, clipped=clipped):
            return noise(noise.grid.add(noise.zeros(), clipped(x)), step)

        program = jax.jit(release) if compiled else release
        if norm <= 1:
            jax.block_until_ready(program(jnp.arange(4.0)))
        else:
            assert "a larger norm than the noise" in refused(program, jnp.arange(4.0))
    assert ledger.steps() == 2


@pytest.mark.parametrize("kind", [float, np.float32, jnp.float32])
def test_norms_of_parts_that_a_call_is_given_fit_their_own_sensitivity(kind):
    def loss(params, x):
        return jnp.sum(params["a"]) * x + jnp.sum(params["b"])

    grad_fn = tanager.clipped_grad(loss, clip_norm={"a": 1.0, "b": 1.0})
    params = {name: PARAMS[name] for name in "ab"}
    for a, b in ((0.3, 0.1), (1.7, 0.2), (1e-3, 123.4)):
        norms = {"a": kind(a), "b": kind(b)}
        own = tanager.clipped_grad(loss, clip_norm={"a": a, "b": b})
        for sensitivity in (grad_fn.sensitivity_at(norms), own.sensitivity):
            noise = tanager.GaussianNoise(
                MECHANISM, float(sensitivity), SEED, params, tanager.Ledger()
            )
            clipped = grad_fn(params, jnp.arange(3.0), clip_norm=norms)
            noise(noise.grid.add(noise.zeros(), clipped), 0)


def test_sums_are_added_without_a_transfer():
    noise = noise_with(tanager.Ledger())
    clipped, zeros = clipped_by(noise), noise.zeros()
    for sums in (clipped, clipped.sum):
        noise.grid.add(zeros, sums)
        with jax.transfer_guard("disallow"):
            noise.grid.add(zeros, sums)
