"""The pictures of a search show the numbers they are given, and nothing bent."""

import itertools
import pathlib
from fractions import Fraction

import numpy as np
import pytest
from matplotlib.figure import Figure

from tanager.report import search_figures
from tanager.search.scaling_law import ScalingLaw


RUNS = [(16, 0.93), (16, 0.965), (32, 0.94), (64, 0.951), (64, 0.972)]
ROWS = [
    {
        "title": {"order": order, "multiplicity": k},
        "accuracy": accuracy,
        "deviation": 0.01,
        "runs": [accuracy - 0.01, accuracy + 0.01],
    }
    for order, k, accuracy in [("pre", 1, 0.5), ("pre", 4, 0.6), ("post", 1, 0.7)]
]


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **o: figures.append(figure)
    )
    return figures


def law(path, obtained=()):
    fitted = ScalingLaw.fit(RUNS)
    sizes = np.geomspace(16, 512, 20).tolist()
    search_figures.plot_law(
        fitted.to_json(),
        {"reference_batch_size": 512, **fitted.predict(512)._asdict()},
        [(size, fitted.at(size), *fitted.band(size)) for size in sizes],
        path,
        title="law",
        obtained=obtained,
    )
    return fitted


def test_the_law_is_a_line_even_where_its_band_is_cut_off(drawn):
    fitted = law("law.svg", [(512, 0.96)])
    (axes,) = drawn[0].axes
    lines = [line.get_xydata() for line in axes.get_lines()]
    dashed = lines[0]
    slopes = np.diff(dashed[:, 1]) / np.diff(np.log2(dashed[:, 0]))
    np.testing.assert_allclose(slopes, 100 * fitted.slope, rtol=1e-6)
    np.testing.assert_allclose(lines[1], [(b, 100 * a) for b, a in RUNS])
    assert any(np.allclose(line, [(512, 96)]) for line in lines)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "predicted, with the 95 % interval of one run" in labels
    assert "obtained, on test examples" in labels


def test_a_grid_has_a_line_for_each_value_of_the_others(drawn):
    search_figures.plot_grid(ROWS, "grid.png", along="multiplicity", title="grid")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["order pre", "order post"]
    bars = [container for container in axes.containers if container.has_yerr]
    (ends,) = bars[0][2]
    for segment, middle in zip(ends.get_segments(), (50, 60), strict=True):
        np.testing.assert_allclose(segment[:, 1], [middle - 2, middle + 2])


@pytest.mark.parametrize(("runs", "apart"), [(1, 0.0), (2, 0.05)])
def test_only_points_with_bars_are_drawn_beside_their_place(drawn, runs, apart):
    rows = [row | {"runs": row["runs"][:runs]} for row in ROWS]
    search_figures.plot_grid(rows, "grid.png", along="multiplicity", title="grid")
    places = [bars[0].get_xdata().tolist() for bars in drawn[0].axes[0].containers]
    assert places == [[0, 1], [apart]]


def test_a_setting_without_the_name_on_the_axis_has_a_place_there(drawn):
    """As Adam has none for momentum."""
    rows = [ROWS[0], ROWS[1] | {"title": {"order": "post"}}]
    search_figures.plot_grid(rows, "grid.png", along="multiplicity", title="grid")
    labels = drawn[0].axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["1", "none"]


def test_a_prediction_is_a_hollow_point_after_the_rows(drawn):
    rows = [
        {"title": {"examples": n}, "accuracy": a, "deviation": None, "runs": (a,)}
        for n, a in ((100, 0.5), (200, 0.6))
    ]
    told = {"accuracy": 0.7, "low": 0.6, "high": 0.9, "confidence": 0.95}
    search_figures.plot_grid(
        rows,
        "data.png",
        along="examples",
        title="data",
        predicted={"examples": 400, "prediction": told},
    )
    (axes,) = drawn[0].axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["100", "200", "400\npredicted, 95 %"]
    caps = axes.containers[0][1]
    drawn_at = np.array([line.get_ydata() for line in caps], float)
    assert np.isnan(drawn_at).all()  # one run each
    point = axes.containers[-1]
    np.testing.assert_allclose(point[0].get_xydata(), [(2, 70)])
    assert point[0].get_markerfacecolor() == "white"
    (ends,) = point[2]
    np.testing.assert_allclose(ends.get_segments()[0][:, 1], [60, 90])


def test_a_budget_is_drawn_by_what_is_best(drawn):
    def row(batch_size, steps, rate, accuracy):
        fields = {"batch_size": batch_size, "steps": steps, "learning_rate": rate}
        fields |= {"accuracy": accuracy, "deviation": None}
        return fields | {"noise_multiplier": np.sqrt(batch_size * steps)}

    rows = [
        *(row(64, 10, 1.0, 0.5), row(64, 10, 2.0, 0.6), row(64, 40, 1.0, 0.3)),
        *(row(256, 10, 1.0, 0.4), row(256, 40, 2.0, 0.7)),
    ]
    search_figures.plot_budget(rows, 640, "budget.png")
    points = [
        [
            (list(bar.lines[0].get_xdata()), list(bar.lines[0].get_ydata()))
            for bar in axes.containers
        ]
        for axes in drawn[0].axes
    ]
    assert points[0] == [([64, 256], pytest.approx([60, 70]))]
    assert points[2][0] == ([10, 40], pytest.approx([60, 30]))
    assert points[2][1] == ([10, 40], pytest.approx([40, 70]))
    assert points[3] == [([64, 256], [10, 40])]
    assert points[4] == [([64, 256], [1, 16])]
    assert points[5] == [([64, 256], [2, 2])]
    named = {bar.lines[0].get_color() for bar in drawn[0].axes[1].containers}
    for number in (0, 3, 4, 5):  # of no single batch size, which the legend names
        (bar,) = drawn[0].axes[number].containers
        assert bar.lines[0].get_color() not in named
        assert bar.lines[0].get_linestyle() == "-"
    search_figures.plot_budget([*rows, row(65, 10, 1.0, 0.4)], 640, "budget.png")
    labels = [label.get_text() for label in drawn[1].axes[0].get_xticklabels()]
    assert labels == ["64", "", "256"]  # 64 and 65 would lie on each other
    both = [row | {"training_accuracy": row["accuracy"] + 0.1} for row in rows]
    search_figures.plot_budget(both, 640, "budget.png")
    axes = drawn[2].axes
    hollow = [line for line in axes[0].lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_ydata()) for line in hollow] == [pytest.approx([70, 80])]
    assert "hollow" in axes[2].get_ylabel()
    assert "hollow" not in axes[3].get_ylabel()


def test_many_lines_differ_and_their_legends_hide_none(drawn):
    sizes = [2**power for power in range(8, 15)]
    row = {"steps": 10, "learning_rate": 1.0, "noise_multiplier": 1.0}
    row |= {"accuracy": 0.5, "deviation": None}
    rows = [row | {"batch_size": size} for size in sizes]
    search_figures.plot_budget(rows, 640, "budget.png")
    curve = {"epsilon": [1.0, 2.0], "accuracy": [0.1, 0.2]}
    curves = [curve | {"title": {"model": str(size)}} for size in sizes]
    search_figures.plot_curves(curves, "curves.png")
    budget, several = drawn
    search_figures.plot_curves(curves[:3], "curves.png")
    bars = [bar.lines[0] for bar in budget.axes[1].containers]
    for lines in (bars, several.axes[0].lines):
        looks = {(line.get_color(), line.get_linestyle()) for line in lines}
        assert len(looks) == len(sizes)
    for figure in drawn:
        figure.draw_without_rendering()
        legend = (figure.legends or [figure.axes[0].get_legend()])[0]
        assert len(legend.get_texts()) == (3 if figure is drawn[2] else len(sizes))
        place = legend.get_window_extent()
        assert not any(
            place.overlaps(axes.patch.get_window_extent()) for axes in figure.axes
        )


def test_labels_of_many_changes_leave_each_other_room(drawn):
    names = "none", "batch size 4096", "normalisation order post-activation"
    names += "weight standardisation True", "augmentation multiplicity 16"
    names += "ema decay 0.9999", "learning rate 4.0", "clip norm 1.0"
    rows = [ROWS[0] | {"title": {"change": name}} for name in names]
    search_figures.plot_grid(rows, "grid.png", along="change", title="grid")
    drawn[0].draw_without_rendering()
    labels = drawn[0].axes[0].get_xticklabels()
    ends = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ends))


def test_curves_are_drawn_against_what_was_spent(drawn):
    curves = [
        {"title": {"model": name}, "steps": [1, 2], "epsilon": [1.0, 2.0]}
        | {"accuracy": [0.1, 0.2]}
        for name in ("a", "b")
    ]
    search_figures.plot_curves(curves, "curves.png")
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.lines] == ["model a", "model b"]
    assert list(axes.lines[0].get_xdata()) == [1, 2]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([10, 20])
    assert axes.lines[0].get_marker() == "."  # a run that is evaluated once is seen


def test_norms_are_marked_private(drawn):
    edges, counts = [0.5, 1.0, 2.0], [[0, 1, 3, 0], [0, 4, 0, 0]]
    search_figures.plot_norms(edges, counts, (10, 20), 1.0, pathlib.Path("norms.png"))
    (axes,) = drawn[0].axes
    assert axes.get_title().startswith("PRIVATE")
    shares = [patch.get_data().values.tolist() for patch in axes.patches]
    assert shares == [[25.0, 75.0], [100.0, 0.0]]
    assert "bar" not in axes.get_xlabel()


def test_norms_beyond_the_bins_are_drawn_and_named(drawn):
    """Gradients that went to zero are what TAN's Figure 7 shows."""
    edges, counts = [0.5, 1.0, 2.0], [[6, 1, 2, 1], [9, 0, 1, 0]]
    search_figures.plot_norms(edges, counts, (10, 20), 1.0, pathlib.Path("norms.png"))
    (axes,) = drawn[0].axes
    data = [patch.get_data() for patch in axes.patches]
    assert [each.values.tolist() for each in data] == [
        [60.0, 10.0, 20.0, 10.0],
        [90.0, 0.0, 10.0, 0.0],
    ]
    assert data[0].edges.tolist() == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert "leftmost bar: all norms below 1/2" in axes.get_xlabel()
    assert "rightmost bar: all norms from 2 on" in axes.get_xlabel()


def test_small_norms_have_labels_that_leave_each_other_room(drawn):
    edges = [2.0**power for power in range(-12, 8)]
    counts = [[1] * (len(edges) + 1)]
    search_figures.plot_norms(edges, counts, (10,), 1.0, pathlib.Path("norms.png"))
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    low, high = axes.get_xlim()
    labels = [
        label
        for label in axes.get_xticklabels()
        if low <= label.get_position()[0] <= high
    ]
    told = [label.get_text() for label in labels]
    assert len(told) >= 4
    np.testing.assert_array_equal(
        [float(Fraction(each)) for each in told],
        [label.get_position()[0] for label in labels],
    )
    ends = [label.get_window_extent() for label in labels]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "draw",
    [
        law,
        lambda path: search_figures.plot_grid(
            ROWS, path, along="multiplicity", title="grid"
        ),
        lambda path: search_figures.plot_norms(
            [0.5, 1.0, 2.0], [[0, 1, 3, 0]], (10,), 1.0, path
        ),
    ],
)
def test_files_are_pictures_without_time_or_links(draw, tmp_path):
    draw(tmp_path / "one.svg")
    draw(tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "creativecommons" not in text
    draw(tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw(tmp_path / "one.pdf")
