"""On one device or several, parameters whole or in shares: the same training."""

import jax
import jax.numpy as jnp
import pytest

from cases import in_full
from parts import step
from scripts import on_devices
from tanager.parallel.layout import Layout
from tanager.privacy.mechanism import Mechanism
from tanager.training.norms import BINS


# Sums over other parts of a batch round differently: 10 steps, each to the grid.
ROUNDING = 1e-5


@pytest.fixture(scope="session")
def found(tmp_path_factory):
    runs, cache = (tmp_path_factory.mktemp(name) for name in ("runs", "c"))
    return on_devices(8, "on_eight_devices.py", runs, TANAGER_CACHE_DIR=str(cache))


@pytest.mark.slow
def test_devices_physical_batches_and_shares_change_nothing_but_rounding(found):
    """Steps 1 to 5 on eight devices, in shares, and the others on two, whole."""
    equality = found["equality"]
    assert equality["moved"] > 0.1
    assert (equality["stopped"], equality["steps"]) == (5, 10)
    assert equality["difference"] < ROUNDING
    assert equality["average"] < ROUNDING
    accuracies = [accuracy for _, accuracy in equality["expected"]]
    assert [accuracy for _, accuracy in equality["lines"]] == accuracies


@pytest.mark.slow
def test_devices_shares_and_the_order_of_batches_do_not_change_a_bit(found):
    """As long as a device has as many rows: the same sums in the same whole numbers.

    XLA may compile the update of shares with other rounding.
    """
    assert found["bits"]["tried"] == 8
    assert found["bits"]["of_shares"] < 1e-7
    assert found["bits"]["results"] == 1
    assert found["bits"]["checksums"] == 1
    # Other rows on a device are other sums, a last bit apart.
    assert found["bits"]["of_other_rows"]


@pytest.mark.slow
def test_adaptive_clipping_counts_the_examples_of_all_devices_once(found):
    norms = [norm for norm, _ in found["equality"]["expected"]]
    assert len(set(norms)) == 10
    own = [norm for norm, _ in found["equality"]["lines"]]
    assert own == pytest.approx(norms, rel=1e-6)


@pytest.mark.slow
def test_an_update_is_equation_5_of_lemma_a1_on_any_number_of_devices(found):
    """On one, and on eight with shares; the others give the same bits."""
    assert len(found["lemma"]) == 2
    assert max(found["lemma"]) < ROUNDING


@pytest.mark.slow
def test_planted_bugs_of_many_devices_are_seen(found):
    assert len(found["planted"]) == 3
    for difference in found["planted"].values():
        assert difference > 1e-3


@pytest.mark.slow
def test_whole_parameters_meet_once_for_each_logical_batch(found):
    assert found["whole"]["accumulate"] == {}
    # The sums in two limbs, four counts and a histogram.
    numbers = 2 * found["parameters"] + 4 + BINS
    assert found["whole"]["update"] == {"all-reduce": 4 * numbers}
    assert found["whole"]["replicas_agree"]


@pytest.mark.slow
def test_shares_are_an_eighth_and_no_device_sums_the_whole(found):
    shares = found["shares"]
    # The last bias has 4 entries, which 8 devices cannot cut: it stays whole.
    cut = found["parameters"] - 4
    each = {"all-gather": 4 * cut, "reduce-scatter": 2 * 4 * cut // 8}
    assert shares["accumulate"] == each
    # And the checksum's part of each limb of the three leaves that are cut.
    assert shares["update"] == {"all-reduce": 4 * (2 * 4 + 4 + BINS + 2 * 3 * 4)}
    assert shares["state_here"] == shares["state"] // 8 + 2 * 4 * 4 * 7 // 8
    assert shares["replicas_agree"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", in_full(["auto", "bk", "bk_mixopt"], "bk_mixopt"))
def test_in_shares_no_device_holds_gradients_of_examples_for_the_whole_model(
    found, strategy
):
    wide = found["wide"][strategy]
    # The gathered model, its sum, and activations; not a model for each of 32 rows.
    assert wide["temporary"] < 4 * wide["model"] < wide["rows_each"] * wide["model"]
    # Each device draws the noise of its own shares.
    assert wide["largest_in_update"] <= 2 * wide["share"]
    assert found["wide_whole"]["largest_in_update"] >= 8 * wide["share"]


def test_in_shares_the_strategy_that_forms_all_gradients_is_refused():
    with pytest.raises(ValueError, match=r"strategy .*per_example.* shares"):
        step(
            loss=lambda params, example: params["w"] @ example,
            params={"w": jnp.zeros(3)},
            mechanism=Mechanism(0.1, 1.0, 3),
            examples=10,
            strategy="per_example",
            layout=Layout(2, shard_parameters=True),
        )


@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (4, 6), (6, 4)])
def test_shapes_alone_decide_how_a_parameter_lies(shape):
    layout = Layout(2, shard_parameters=True)
    even = [size for size in shape if size % 2 == 0]
    spec = layout.spec(shape)
    if even:
        assert shape[len(spec) - 1] == max(even)
    else:
        assert not any(spec)
    assert not any(Layout(2).spec(shape))


def test_a_physical_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"physical_batch_size \(=5\).* give 4 or 6"):
        Layout(2).check(5)
    with pytest.raises(ValueError, match=r"physical_batch_size \(=1\).* give 2 or 4"):
        Layout(2).check(1)


def test_more_devices_than_there_are_are_refused_and_fewer_on_several_hosts(
    monkeypatch,
):
    with pytest.raises(ValueError, match=r"devices \(=3\) must be at most 2"):
        Layout(3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"devices \(=1\) must be all 2 on several"):
        Layout(1)
