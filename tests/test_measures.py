"""What is said of a classifier is scikit-learn's, and its intervals hold."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from cases import in_full
from tanager import measures
from tanager.measures import measure


def drawn(count, classes, seed=0, better=0.4):
    draw = np.random.default_rng(seed)
    labels = draw.integers(classes, size=count)
    scores = draw.random((count, classes)).round(2)  # with ties
    scores[np.arange(count), labels] += better
    return scores / scores.sum(axis=1, keepdims=True), labels


def f1(matrix):
    return measures._f1(matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0))


def test_the_numbers_are_those_of_scikit_learn():
    scores, labels = drawn(200, 4)
    found = measure(scores, labels, "abcd")
    predicted = scores.argmax(axis=1)
    expected = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "balanced_accuracy": metrics.balanced_accuracy_score(labels, predicted),
        "macro_f1": metrics.f1_score(labels, predicted, average="macro"),
        "auroc": metrics.roc_auc_score(labels, scores, multi_class="ovr"),
    }
    for name, value in expected.items():
        assert found[name]["value"] == pytest.approx(value, abs=1e-12), name
        assert found[name]["low"] < value < found[name]["high"], name
    assert found["majority_share"] == np.bincount(labels).max() / 200
    assert np.sum(found["confusion_matrix"]) == found["examples"] == 200
    assert measure(scores, labels, "abcd") == found


def test_of_many_classes_the_five_likeliest_count_too():
    scores, labels = drawn(200, 12)
    scores = scores + 1e-6 * np.random.default_rng(1).random(scores.shape)  # no ties
    found = measure(scores, labels, "abcdefghijkl")["top_5_accuracy"]
    ranks = (scores > scores[np.arange(200), labels][:, None]).sum(1)
    assert np.mean(ranks < 5) == found["value"]
    assert 0.5 < found["low"] < found["value"] < found["high"] < 1
    assert "top_5_accuracy" not in measure(scores[:, :9], labels % 9, "abcdefghi")


def test_what_is_drawn_again_is_measured_as_scikit_learn_does():
    """The formulas of the intervals, which are computed many times."""
    scores, labels = drawn(90, 3)
    weights = np.random.default_rng(1).integers(0, 4, 90)
    for weight in (np.ones(90), weights):
        ours = measures.Ranked(scores[:, 0], labels == 0).area(weight)
        sklearns = metrics.roc_auc_score(
            labels == 0, scores[:, 0], sample_weight=weight
        )
        assert ours == pytest.approx(sklearns, abs=1e-12)


def test_wilson_s_interval_is_the_published_one():
    """Newcombe 1998, table I: 81 of 263 and 0 of 20, method 3."""
    for right, count, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0, 0.1611)):
        found = measures._share(right, count)
        assert found["low"] == pytest.approx(low, abs=5e-5)
        assert found["high"] == pytest.approx(high, abs=5e-5)


def test_where_all_are_right_intervals_say_how_sure_that_is():
    labels = np.arange(40) % 2
    found = measure(np.eye(2)[labels], labels, ["no", "yes"])
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc"):
        assert 0.85 < found[name]["low"] < found[name]["high"] == 1, name


@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
@pytest.mark.parametrize(
    "sizes", in_full([(4, 4), (5, 5), (4, 7), (10, 10), (4, 20)], (4, 7), (10, 10))
)
def test_means_over_classes_have_intervals_that_hold(sizes, chance):
    """Exact, of two classes; Wilson's, combined, hold 88 to 94 % of (5, 5)."""
    labels = np.repeat([0, 1], sizes)
    mean = np.array(sizes)[:, None] * [[chance, 1 - chance], [1 - chance, chance]]
    truth = {"balanced_accuracy": chance, "macro_f1": f1(mean)}
    held, seen = dict.fromkeys(truth, 0.0), 0.0
    for right in itertools.product(*(range(size + 1) for size in sizes)):
        likely = math.prod(stats.binom.pmf(right, sizes, chance))
        if likely < 1e-4:
            continue
        wrong = [np.arange(n) >= found for n, found in zip(sizes, right, strict=True)]
        predicted = labels ^ np.concatenate(wrong)
        found = measure(np.eye(2)[predicted], labels, "ab", bootstrap=False)
        seen += likely
        for name, value in truth.items():
            low, high = found[name]["low"], found[name]["high"]
            held[name] += likely * (low - 1e-9 <= value <= high + 1e-9)
    assert min(held.values()) > 0.95 * seen, held


@pytest.mark.statistical
@pytest.mark.parametrize("chance", [0.5, 0.8, 0.95])
def test_means_over_many_small_classes_have_intervals_that_hold(chance):
    """94 % of 400 samples; false-alarm rate below 1e-6, as 96 to 99 % hold of 4000.

    Wilson's of the classes, combined, hold for 85 to 90 %.
    """
    shares = np.full((10, 10), (1 - chance) / 9)
    np.fill_diagonal(shares, chance)
    draw = np.random.default_rng(0)
    truth = {measures._recall: chance, measures._f1: f1(shares)}
    held = dict.fromkeys(truth, 0)
    for _ in range(400):
        matrix = np.stack([draw.multinomial(4, row) for row in shares])
        for statistic, value in truth.items():
            found: dict[str, Any] = measures._combined(matrix, statistic)
            held[statistic] += found["low"] <= value <= found["high"]
    assert min(held.values()) >= stats.binom.isf(1 - 1e-6, 400, 0.94), held


def test_the_interval_of_one_class_among_sure_ones_is_exact():
    """By hand: of two classes, one with very many examples, the mean moves by half."""
    labels = np.repeat([0, 1], [100_000, 20])
    predicted = labels.copy()
    predicted[-3:] = 0
    found = measure(np.eye(2)[predicted], labels, "ab", bootstrap=False)
    own = stats.binomtest(17, 20).proportion_ci(0.95, "exact")
    for end in ("low", "high"):
        half = (1 + getattr(own, end)) / 2
        assert found["balanced_accuracy"][end] == pytest.approx(half, abs=1e-4)


@pytest.mark.statistical
@pytest.mark.parametrize("of_labels", [False, True])
def test_intervals_of_areas_hold_with_few_examples_of_a_kind(monkeypatch, of_labels):
    """Their deviation alone holds for 89 of these 100, their middle 95 % for 72."""
    monkeypatch.setattr(measures, "RESAMPLES", 60)
    true, held = 0.98, 0
    labels = np.repeat([0, 1], [150, 10])
    for seed in range(100):
        scores = np.random.default_rng(seed).normal(size=160)
        scores += labels * stats.norm.ppf(true) * math.sqrt(2)
        chances = measures.chances(scores)
        if of_labels:
            found = measures.measure_labels(chances[:, None], labels[:, None], "a")
        else:
            found = measure(np.stack([1 - chances, chances], 1), labels, "ab")
        own = found["auroc"]
        held += own["low"] <= true <= own["high"]
    assert held >= 93, held


def test_an_area_s_interval_is_newcombe_s():
    """Newcombe 2006, method 5: the true areas that lie 1.96 deviations off."""
    for area in (1e-3, 0.3, 0.8, 0.97, 1.0):
        low = measures._lowest(area, 12, 40)
        # The variance of Hanley and McNeil 1982, with 19 in place of 11 and of 27.
        one, both = low / (2 - low), 2 * low**2 / (1 + low)
        variance = low * (1 - low) + 19 * (one + both - 2 * low**2)
        deviation = math.sqrt(variance / (12 * 28))
        assert area - low == pytest.approx(stats.norm.ppf(0.975) * deviation, rel=1e-6)
    assert measures._lowest(0.0, 12, 40) == 0


def test_the_mean_of_areas_has_the_interval_of_all_of_them():
    """Of one area twice it is that area's, of independent ones narrower by √2."""
    first, second = np.random.default_rng(0).normal(0.8, 1e-6, (2, 4000)).tolist()

    def away(*drawn):
        number = len(drawn)
        found = measures._area(number * [0.8], drawn, np.full(number, 20), 40)
        return np.array([found["low"], found["high"]]) - 0.8

    one = away(first)
    assert away(first, first) == pytest.approx(one)
    assert away(first, second) == pytest.approx(one / math.sqrt(2), rel=0.05)
    assert one[0] == pytest.approx(measures._lowest(0.8, 20, 40) - 0.8)


def test_of_fewer_than_ten_examples_of_a_class_no_area_has_an_interval():
    scores, labels = drawn(100, 3)
    few = np.flatnonzero(labels != 2)
    few = np.append(few, np.flatnonzero(labels == 2)[:9])
    found = measure(scores[few], labels[few], "abc")
    assert found["auroc"]["value"] and found["auroc"]["low"] is None
    assert measure(scores, labels, "abc")["auroc"]["low"] is not None


def test_two_classes_and_missing_ones():
    scores, labels = drawn(80, 2)
    found = measure(scores, labels, ["no", "yes"])
    area = metrics.roc_auc_score(labels, scores[:, 1])
    assert found["auroc"]["value"] == pytest.approx(area)
    # A class of the model that the data lack leaves the means alone.
    padded = np.concatenate([scores, np.zeros((80, 1))], axis=1)
    wider = measure(padded, labels, ["no", "yes", "maybe"])
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "auroc"):
        assert wider[name]["value"] == pytest.approx(found[name]["value"]), name
    absent = wider["per_class"][2]
    assert absent["examples"] == 0 and absent["accuracy"]["value"] is None
    assert absent["auroc"] is None
    alone = measure(scores[labels == 1], labels[labels == 1], ["no", "yes"])
    assert alone["auroc"] == {"value": None, "low": None, "high": None}
    assert alone["majority_share"] == 1


@pytest.mark.statistical
def test_intervals_hold_in_most_samples(monkeypatch):
    """Of 40 samples, an interval of 94 % misses 11 by chance once in 10,000 tests."""
    truth = measure(*drawn(20_000, 3, seed=99), "abc")
    monkeypatch.setattr(measures, "RESAMPLES", 150)
    missed = dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "auroc"), 0)
    for seed in range(40):
        found = measure(*drawn(150, 3, seed), "abc")
        for name in missed:
            value = truth[name]["value"]
            missed[name] += not found[name]["low"] <= value <= found[name]["high"]
    assert max(missed.values()) < 11, missed


def test_shapes_that_do_not_fit_are_refused():
    for scores, labels in (((3, 2), [0, 1]), ((0, 2), []), ((2, 3), [0, 1])):
        with pytest.raises(ValueError, match=r"probabilities .* must be \[n, 2\]"):
            measure(np.zeros(scores), np.array(labels, int), "ab")
    with pytest.raises(ValueError, match=r"probabilities \(=.*NaN.*must be numbers"):
        measure(np.array([[0.5, np.nan], [1, 0]]), np.array([0, 1]), "ab")


### Any number of labels


def labelled(count, seed=0, better=1.0):
    """Three labels, each rarer than the one before, and scores with ties."""
    draw = np.random.default_rng(seed)
    labels = draw.random((count, 3)) < (0.5, 0.3, 0.15)
    logits = draw.normal(size=(count, 3)) + better * labels - 0.5
    return measures.chances(logits.round(1)), labels.astype(np.int32)


def test_labels_are_measured_as_scikit_learn_does():
    scores, labels = labelled(300)
    found = measures.measure_labels(scores, labels, "abc")
    expected = {
        "auroc": metrics.roc_auc_score,
        "average_precision": metrics.average_precision_score,
    }
    for name, function in expected.items():
        values = [function(labels[:, k], scores[:, k]) for k in range(3)]
        own = [each[name] for each in found["per_class"]]
        assert [each["value"] for each in own] == pytest.approx([*values])
        assert found[name]["value"] == pytest.approx(np.mean(values))
        for each in (found[name], *own):
            assert each["low"] < each["value"] < each["high"]
        # The mean of labels is known better than each of them.
        widths = [each["high"] - each["low"] for each in own]
        assert found[name]["high"] - found[name]["low"] < max(widths)
    for k, each in enumerate(found["per_class"]):
        named = scores[:, k] >= 0.5
        recall = metrics.recall_score(labels[:, k], named)
        assert each["sensitivity"]["value"] == pytest.approx(recall)
        recall = metrics.recall_score(labels[:, k], named, pos_label=0)
        assert each["specificity"]["value"] == pytest.approx(recall)
        assert each["examples"] == labels[:, k].sum()
    assert measures.measure_labels(scores, labels, "abc") == found


def test_a_weighted_average_precision_is_scikit_learn_s():
    scores, labels = labelled(90)
    weights = np.random.default_rng(1).exponential(size=90)
    for k in range(3):
        positive = labels[:, k] == 1
        expected = metrics.average_precision_score(
            positive, scores[:, k], sample_weight=weights
        )
        found = measures.Ranked(scores[:, k], positive).precision(weights)
        assert found == pytest.approx(expected, abs=1e-12)


def test_rare_labels_have_no_interval_and_missing_ones_no_value():
    scores, labels = labelled(60)
    rare = labels.copy()
    rare[:, 1], rare[5:10, 1], rare[:, 2] = 0, 1, 0
    found = measures.measure_labels(scores, rare, "abc")
    first, few, none = found["per_class"]
    assert first["auroc"]["low"] and few["auroc"]["value"]
    nothing = {"value": None, "low": None, "high": None}
    for name in ("auroc", "average_precision"):
        assert few[name]["low"] is few[name]["high"] is None
        assert none[name] == nothing
        values = [first[name]["value"], few[name]["value"]]
        assert found[name] == {**nothing, "value": pytest.approx(np.mean(values))}
    assert none["sensitivity"] == nothing and none["specificity"]["value"] is not None
    empty = measures.measure_labels(scores, np.zeros_like(labels), "abc")
    assert empty["auroc"] == nothing
    for shape in ((60, 2), (59, 3)):
        with pytest.raises(ValueError, match=r"probabilities .* must be \[60, 3\]"):
            measures.measure_labels(np.zeros(shape), labels, "abc")


@pytest.mark.statistical
def test_intervals_of_labels_hold_in_most_samples(monkeypatch):
    """As above, for eight numbers: one test in 1,000 fails by chance."""
    truth = measures.measure_labels(*labelled(20_000, seed=99), "abc", bootstrap=False)
    monkeypatch.setattr(measures, "RESAMPLES", 150)
    missed = {}
    for seed in range(40):
        found = measures.measure_labels(*labelled(150, seed), "abc")
        pairs = [
            (found, truth),
            *zip(found["per_class"], truth["per_class"], strict=True),
        ]
        for number, (own, true) in enumerate(pairs):
            for name in ("auroc", "average_precision"):
                place = (number, name)
                missed.setdefault(place, 0)
                if own[name]["low"] is not None:
                    inside = (
                        own[name]["low"] <= true[name]["value"] <= own[name]["high"]
                    )
                    missed[place] += not inside
    assert max(missed.values()) < 11, missed
