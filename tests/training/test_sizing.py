"""A physical batch that is chosen: what is tried, what is kept, and on what."""

import json

import jax
import numpy as np
import pytest
from scipy import stats
from small_runs import EVALUATE, die, first_params, loss, run

from parts import step
from tanager import Mechanism, Runtime
from tanager.parallel import hosts
from tanager.parallel.layout import Layout
from tanager.training import sizing


ONE = {"x": np.ones((1, 4), np.float32), "label": np.ones(1, np.int32)}


def small_step(rate=1.0, examples=1000, steps=10**9):
    return step(
        loss=loss,
        params=first_params(),
        mechanism=Mechanism(rate, 1.0, steps),
        examples=examples,
    )


def choose(monkeypatch, seconds, *, share=0.1, **settings):
    """The size chosen, and those tried, where a size takes these seconds."""
    tried = []

    def timed(step, one, size, room):
        tried.append(size)
        return seconds(size)

    monkeypatch.setattr(sizing, "_seconds", timed)
    chosen = sizing.choose(small_step(**settings), ONE, share, lambda text: None)
    return chosen, tried


@pytest.mark.parametrize(
    ("seconds", "chosen", "tried"),
    [
        (lambda size: 1.0, 1024, [16, 32, 64, 128, 256, 512, 1024]),
        (lambda size: size, 16, [16, 32, 64]),
        (lambda size: size + 100 * (size == 32), 16, [16, 32, 64]),
        (lambda size: 1.0 if size <= 64 else None, 64, [16, 32, 64, 128]),
        (lambda size: 1.0 if size <= 4 else None, 4, [16, 8, 4]),
        (lambda size: None, 1, [16, 8, 4, 2, 1]),
    ],
    ids=["grows", "plateau", "slow", "memory", "less", "nothing-fits"],
)
def test_the_fastest_that_fits_is_chosen(monkeypatch, seconds, chosen, tried):
    assert choose(monkeypatch, seconds) == (chosen, tried)


def test_sizes_are_tried_for_a_share_of_the_run_only(monkeypatch):
    assert choose(monkeypatch, lambda size: 1.0, share=0.0) == (16, [16])
    short = choose(monkeypatch, lambda size: 1e-9, steps=1)
    assert short == (16, [16])
    few = choose(monkeypatch, lambda size: 1.0, rate=0.004)
    assert few == (8, [4, 8, 16])


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("examples", [1, 60, 5000])
def test_hardly_a_batch_is_larger_than_what_is_taken(rate, examples):
    sampler = small_step(rate, examples).sampler
    for devices in (1, 3):
        size = sizing.enough(sampler, 3000, devices)
        if size < 3000:
            assert size % devices == 0
            assert stats.binom.sf(size, examples, rate) < 0.01
        assert sizing.enough(sampler, 6, devices) <= 6
    if rate == 1 and examples > 16:
        assert sizing.enough(sampler, 9999, 1) == examples  # no row of padding


@pytest.fixture(scope="module")
def eight():
    """A run of seed 1 with physical batches of 8."""
    return run(physical_batch_size=8, seed=1)


def test_a_run_takes_no_more_than_a_batch_holds(tmp_path, eight):
    large = run(tmp_path / "large", physical_batch_size=4096, seed=1)
    config = json.loads((tmp_path / "large/config.json").read_text())
    assert config["physical_batch_size"] == 43
    leaves = [jax.tree.leaves(each.params) for each in (large, eight)]
    for some, same in zip(*leaves, strict=True):
        np.testing.assert_allclose(some, same, rtol=1e-3, atol=1e-4)


def test_memory_is_analysed_before_anything_runs(monkeypatch):
    made = small_step().on_rows()
    assert sizing._seconds(made, ONE, 8, 1e12) is not None

    def fails(text):
        def compiled(batch):
            assert not batch.mask.any()
            assert not any(leaf.any() for leaf in jax.tree.leaves(batch.examples))

            def broken():
                raise jax.errors.JaxRuntimeError(text)

            return small_step().on_rows().compiled(batch)[0], broken

        monkeypatch.setattr(made, "compiled", compiled)

    fails("INTERNAL: a fault")
    assert sizing._seconds(made, ONE, 8, 0.0) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault"):
        sizing._seconds(made, ONE, 8, 1e12)
    fails("RESOURCE_EXHAUSTED: Out of memory")
    assert sizing._seconds(made, ONE, 8, 1e12) is None
    assert 0 < sizing._room(made) < 1e14


def test_a_run_records_the_size_and_its_resume_keeps_it(tmp_path, eight, monkeypatch):
    """It ends as the run that is given the size."""
    monkeypatch.setattr(sizing, "choose", lambda *rest: 8)
    auto = {"physical_batch_size": "auto", "seed": 1}
    die(tmp_path / "auto", 2, **auto)
    monkeypatch.setattr(sizing, "choose", lambda *rest: pytest.fail("chosen again"))
    result = run(tmp_path / "auto", evaluate=EVALUATE, **auto)
    config = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert config["physical_batch_size"] == 8
    for mine, other in zip(
        jax.tree.leaves(result.params), jax.tree.leaves(eight.params), strict=True
    ):
        np.testing.assert_array_equal(mine, other)


def test_a_run_finds_a_size(tmp_path):
    run(tmp_path, physical_batch_size="auto", measure_share=0.0, devices=2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["physical_batch_size"] == 32


@pytest.mark.parametrize("size", ["large", 0, 2.5, None])
def test_another_size_is_refused(size):
    with pytest.raises(ValueError, match="physical_batch_size"):
        run(physical_batch_size=size)


def test_several_hosts_need_a_number(monkeypatch):
    monkeypatch.setattr(hosts, "count", lambda: 2)
    with pytest.raises(ValueError, match="must be a number on several hosts"):
        sizing.least(Runtime(physical_batch_size="auto"), Layout(1))
