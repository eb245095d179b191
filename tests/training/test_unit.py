"""A person is the unit: sums, runs and resumes on grouped examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tanager
from parts import step, train
from tanager.privacy.mechanism import Mechanism
from tanager.report import guarantee
from tanager.seed import Seed


C, K, FEATURES = 0.5, 4, 6
RUN = Mechanism(0.4, 1.1, 6)
OWNED = (1, 3, 50, *[2] * 20)
OWNERS = np.repeat(np.arange(len(OWNED)), OWNED)
SECRET = Seed.from_int(4)
OPTIMIZER = optax.sgd(0.1)  # one for all runs, so that they share programs


def loss(params, example):
    return (jnp.dot(params["w"], example["x"]) + params["b"] - example["y"]) ** 2


def params():
    return {"w": jnp.linspace(-1, 1, FEATURES), "b": jnp.float32(0.3)}


def examples():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(len(OWNERS), FEATURES)).astype(np.float32)
    return {"x": x, "y": 30 + x[:, 0]}


def grouped(data=None, owners=OWNERS, k=K):
    return tanager.Grouped(data or examples(), owners, k)


def step_of(data, **more):
    return step(
        loss=loss,
        params=params(),
        data=data,
        mechanism=RUN,
        examples=len(data.source),
        seed=SECRET,
        clip_norm=C,
        **more,
    )


def total(step, data, number, left_out=None):
    """The sum of a step, as float64; the rows of one person can be left out."""
    sums, key = step.zero(), step.augmentation_key(number)
    for part in step.sampler.batches(number, 8):
        mask = part.mask
        if left_out is not None:
            (own,) = data.groups.members(left_out)[None]
            mask = mask & ~np.isin(part.indices, own)
        rows = {name: leaf[part.indices] for name, leaf in data.data.items()}
        batch = part._replace(examples=rows, mask=mask)
        sums = step.accumulate(step.params, sums, batch, key)
    spacing = step.noise.grid.spacing
    return np.concatenate(
        [
            spacing * ((np.asarray(high, np.int64) << 16) + np.asarray(low)).ravel()
            for high, low in zip(
                jax.tree.leaves(sums.sum.high),
                jax.tree.leaves(sums.sum.low),
                strict=True,
            )
        ]
    ).astype(np.float64)


def by_definition(data, number):
    """Σ clip(mean of the gradients of the examples that are used), in float64."""
    found = np.zeros(FEATURES + 1)
    sampler = tanager.PoissonSampler(RUN, len(OWNED), SECRET, groups=data.groups)
    for person in sampler.indices(number):
        mask, indices = data.groups.choose(SECRET, number, [person])
        each = []
        for row in indices[mask]:
            x, y = (np.asarray(data.data[name][row], np.float64) for name in "xy")
            apart = np.linspace(-1, 1, FEATURES) @ x + np.float32(0.3) - y
            each.append(2 * apart * np.append(1.0, x))
        gradient = np.mean(each, 0)
        found += gradient / max(1.0, np.linalg.norm(gradient) / C)
    return found


@pytest.mark.parametrize("strategy", ["auto", "per_example", "ghost"])
def test_a_sum_is_of_clipped_means_of_at_most_k_examples(strategy):
    data = grouped()
    made = step_of(data, strategy=strategy)
    for number in range(3):
        np.testing.assert_allclose(
            total(made, data, number), by_definition(data, number), atol=2e-3
        )


def test_an_owner_moves_the_sum_by_the_clipping_norm_at_most():
    """Owners of 1, 3 and 50 examples, every one of which alone is clipped."""
    data = grouped()
    made = step_of(data)
    assert made.noise is not None
    most = made.grad_fn.sensitivity + made.noise.grid.rounding
    moved = np.zeros(3)
    for number in range(RUN.steps):
        whole = total(made, data, number)
        for person in range(3):
            without = total(made, data, number, left_out=person)
            apart = np.linalg.norm(whole - without)
            drawn = person in made.sampler.indices(number)
            assert apart <= most and bool(apart) == drawn
            moved[person] = max(moved[person], apart)
    assert (moved > 0.9 * C).all()


def test_planted_per_example_training_moves_it_by_as_many_as_an_owner_has():
    """What grouping prevents: an owner of 50 moves the sum of examples by many C."""
    data = tanager.Grouped(examples(), np.arange(len(OWNERS)), 1)
    made = step_of(data)
    ours = np.flatnonzero(OWNERS == 2)
    apart = []
    for number in range(RUN.steps):
        drawn = np.isin(ours, made.sampler.indices(number)).sum()
        without = tanager.Grouped(
            jax.tree.map(lambda leaf: leaf.copy(), examples()), data.owners, 1
        )
        for leaf in without.data.values():
            leaf[ours] = np.nan  # contributes zero
        moved = total(made, data, number) - total(made, without, number)
        apart.append(np.linalg.norm(moved) / C)
        assert drawn > 5
    assert max(apart) > 2


def test_what_is_not_finite_stays_with_its_owner():
    """Padding of one person's row is never another person's example."""
    data, broken = grouped(), grouped(examples())
    made = step_of(data)
    broken.data["x"][0] = np.nan  # person 0, whose example 0 padding would be
    for number in range(RUN.steps):
        moved = total(made, data, number) - total(made, broken, number)
        if 0 in made.sampler.indices(number):
            assert 0 < np.linalg.norm(moved) <= made.grad_fn.sensitivity
        else:
            assert not moved.any()


class Streamed:
    def __len__(self):
        return len(OWNERS)

    def __getitem__(self, index):
        return {name: leaf[index] for name, leaf in examples().items()}


def run(data, out=None, **more):
    settings = {"mechanism": RUN, "physical_batch_size": 8, "clip_norm": C}
    settings |= {"optimizer": OPTIMIZER, "seed": 5, "strategy": "per_example"} | more
    return train(loss=loss, params=params(), data=data, out=out, **settings)


@pytest.mark.filterwarnings("ignore:")
def test_runs_in_memory_streamed_and_resumed_are_the_same(tmp_path):
    whole = run(grouped(), tmp_path / "one")
    assert whole.summary["unit"] == "person"
    assert whole.summary["examples"] == len(OWNED)
    streamed = run(tanager.Grouped(Streamed(), OWNERS, K))
    for name, leaf in whole.params.items():
        np.testing.assert_allclose(leaf, streamed.params[name], atol=1e-6)

    class Killed(BaseException):
        pass

    def kill(line):
        if line["step"] == 3:
            raise Killed

    options = {"evaluate_every": 1, "checkpoint_seconds": 0.0}
    with pytest.raises(Killed):
        run(grouped(), tmp_path / "two", on_metrics=kill, **options)
    others = (
        (grouped(owners=OWNERS[::-1]), "owners changed"),
        (grouped(k=3), "per_group"),
    )
    for other, what in (*others, (examples(), "unit was 'person'")):
        with pytest.raises(ValueError, match=f"another configuration.*{what}"):
            run(other, tmp_path / "two", **options)
    resumed = run(grouped(), tmp_path / "two", **options)
    for name, leaf in whole.params.items():
        np.testing.assert_array_equal(leaf, resumed.params[name])


@pytest.mark.filterwarnings("ignore:")
def test_views_are_of_each_example():
    """K views of each of the k examples: augmentation by zero changes nothing."""
    noisy = {"augment": lambda key, example: example, "augmentation_multiplicity": 2}
    one, two = run(grouped()), run(grouped(), **noisy)
    for name, leaf in one.params.items():
        np.testing.assert_allclose(leaf, two.params[name], atol=1e-5)


def test_there_is_one_owner_for_each_example():
    with pytest.raises(ValueError, match="one for each of the 94 examples"):
        grouped(owners=OWNERS[:-1])


@pytest.mark.filterwarnings("ignore:")
def test_a_run_claims_what_its_accountant_computes_and_its_report_says_which(tmp_path):
    """Per image, it also states the ε of persons with several images."""
    settings = {"delta": 1e-4, "seed": None}
    found = run(examples(), tmp_path / "run", accountant="rdp", **settings)
    summary = found.summary
    assert found.epsilon == summary["epsilon"] == summary["epsilon_rdp"]
    assert summary["accountant"] == "rdp"
    assert summary["epsilon_of_person"] == {
        str(size): tanager.epsilon(RUN, 1e-4, group=size) for size in (2, 5, 10)
    }
    with pytest.raises(ValueError, match="accountant was 'rdp' and is 'pld'"):
        run(examples(), tmp_path / "run", **settings)
    with pytest.raises(ValueError, match="accountant"):
        run(examples(), accountant="tan")
    page = (tmp_path / "run/report.html").read_text()
    assert "computed with RDP" in page and "RdpAccountant" in page
    shown = guarantee.simulated(summary["epsilon_of_person"]["5"])
    assert f"{shown} with 5 images" in page
