import re
import xml.etree.ElementTree as ElementTree

import pytest
from matplotlib.figure import Figure

from tanager.report import scaling_figures


MEASURED = [
    {"strategy": name, "devices": devices, "examples_per_second": rate}
    for name, rates in (("sgd", (100, 190, 360)), ("auto", (30, 59, None)))
    for devices, rate in zip((1, 2, 4), rates, strict=True)
]
PREDICTED = [
    {
        "strategy": "sgd",
        "devices": devices,
        "computing_seconds": 3.0,
        "communicating_seconds": 1.0,
        "examples_per_second": 75.0 * devices,
        "share_of_ideal": 0.75,
    }
    for devices in (8, 16, 20)
]
PARALLEL = {"sgd": 0.95, "auto": None}


def plot(path, measured=MEASURED, predicted=PREDICTED, parallel=PARALLEL):
    return scaling_figures.plot(measured, parallel, predicted, path, title="mlp")


def draw(monkeypatch, **changes):
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **o: figures.append(figure)
    )
    assert plot("scaling.png", **changes)
    (axes,) = figures[0].axes
    return axes


def lines(axes, style, marker="None"):
    return [
        line.get_xydata().tolist()
        for line in axes.get_lines()
        if line.get_linestyle() == style and line.get_marker() == marker
        if len(line.get_xdata())
    ]


def test_points_are_throughputs_on_logarithmic_axes(monkeypatch):
    axes = draw(monkeypatch)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert lines(axes, "None", "o") == [
        [[1, 100], [2, 190], [4, 360]],
        [[1, 30], [2, 59]],
    ]
    assert lines(axes, "None", "s") == [[[8, 600], [16, 1200], [20, 1500]]]
    assert axes.get_xlabel() == "devices"
    assert axes.get_ylabel() == "examples per second"


def test_ideal_is_dashed_through_one_device_and_the_law_is_dotted(monkeypatch):
    axes = draw(monkeypatch)
    assert lines(axes, "--") == [[[1, 100], [20, 2000]], [[1, 30], [2, 60]]]
    (law,) = lines(axes, ":")
    assert law[0] == [1, 100]
    assert law[-1] == pytest.approx([4, 100 / (0.05 + 0.95 / 4)])


def test_without_a_measurement_one_device_is_what_computing_takes(monkeypatch):
    axes = draw(monkeypatch, measured=[])
    assert lines(axes, "--") == [[[1, 100], [20, 2000]]]
    for few in ([], MEASURED[:1]):
        (law,) = lines(draw(monkeypatch, measured=few), ":")
        assert law[-1] == pytest.approx([20, 100 / (0.05 + 0.95 / 20)])
    assert lines(draw(monkeypatch, measured=[], parallel={}), ":") == []


def test_the_legend_tells_colours_and_kinds(monkeypatch):
    def legend(**changes):
        found = draw(monkeypatch, **changes).get_legend()
        return [text.get_text() for text in found.get_texts()]

    law = "Amdahl's law, fitted"
    strategies = ["sgd: 95.0 % parallel", "auto"]
    assert legend() == [*strategies, "ideal", "measured", law, "simulated"]
    assert legend(predicted=[]) == [*strategies, "ideal", "measured", law]
    for few in (MEASURED[:1], []):
        marks = ["measured"] * len(few) + [law + "\nto the simulation", "simulated"]
        assert legend(measured=few)[-len(marks) - 1 :] == ["ideal", *marks]
    assert legend(measured=[], parallel={}) == ["sgd", "ideal", "simulated"]


def test_labels_keep_apart(monkeypatch):
    ticks = draw(monkeypatch).get_xticks()
    assert ticks.tolist() == [1, 2, 4, 8, 20]


@pytest.mark.parametrize("parallel", [-0.4, 1.6, None])
def test_odd_fits_and_single_points_can_be_drawn(monkeypatch, parallel):
    one = [row | {"strategy": "sgd"} for row in MEASURED[:1]]
    fits = {"sgd": parallel}
    for changes in ({"measured": one, "predicted": []}, {}):
        axes = draw(monkeypatch, parallel=fits, **changes)
        axes.figure.draw_without_rendering()


def test_nothing_measured_is_not_drawn(tmp_path):
    nothing = [MEASURED[-1]]
    assert not plot(tmp_path / "scaling.png", measured=nothing, predicted=[])
    assert list(tmp_path.iterdir()) == []


def test_svg_and_nothing_but_pictures(tmp_path):
    plot(tmp_path / "scaling.SVG")
    assert ElementTree.parse(tmp_path / "scaling.SVG").getroot().tag.endswith("svg")
    with pytest.raises(ValueError, match=re.escape("must end in .png or .svg")):
        plot(tmp_path / "scaling.pdf")
