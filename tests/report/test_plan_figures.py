import dataclasses
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from cases import in_full
from tanager.privacy import accountant, tan
from tanager.privacy.frontier import Point
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.plan import Plan
from tanager.report import plan_figures


PLAN = Plan.solve(50_000, 512, steps=2500, noise_multiplier=0.5, delta=1e-5)


def figure_of(plan):
    """The figure that `plot` saves, of a fourth of the points of each curve."""
    figures, every = [], plan_figures._at_constant_eta

    def some(mechanism, steps):
        points, own = every(mechanism, steps), mechanism.noise_multiplier
        fourth = {id(point) for point in (*points[::4], points[-1])}
        return [p for p in points if id(p) in fourth or p.noise_multiplier == own]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_figures, "_at_constant_eta", some)
        patch.setattr(Figure, "savefig", lambda figure, *a, **o: figures.append(figure))
        plan_figures.plot(plan, "plan.png")
    return figures[0]


@pytest.fixture(scope="module")
def drawn():
    return figure_of(PLAN)


def curves(axes):
    return {line.get_label(): line.get_xydata() for line in axes.get_lines()}


def test_the_left_panel_is_epsilon_at_constant_eta(drawn):
    lines = curves(drawn.axes[0])
    eta = tan.eta(PLAN.mechanism)
    for label, steps in (
        ("$T$ = 156", 156),
        ("$T$ = 2,500 (plan)", 2500),
        ("$T$ = 40,000", 40_000),
    ):
        sigmas, epsilons = lines[label].T
        assert (np.diff(epsilons) < 1e-3).all()
        for sigma, epsilon in list(zip(sigmas, epsilons, strict=True))[::3]:
            q = eta * sigma * np.sqrt(2 / steps)
            exact = accountant.epsilon(
                Mechanism(float(q), float(sigma), steps), 1e-5, "rdp"
            )
            assert epsilon == pytest.approx(exact, rel=1e-9)
        assert epsilons[0] > 5 * epsilons[-1]


# Small σ hide curves on the right, one step of one example those on the left.
USUAL = [(50_000, 4096, 2500, sigma) for sigma in (0.3, 0.5, 2.5, 8.0)]
ONE_STEP = (1000, 1, 1, 100.0)


@pytest.mark.parametrize("sizes", in_full([*USUAL, ONE_STEP], *USUAL[1:3]), ids=str)
def test_the_legends_name_only_what_is_seen(sizes, monkeypatch):
    monkeypatch.setattr(plan_figures, "_ORDERS", (2, 8, 20, 32))
    examples, batch_size, steps, sigma = sizes
    figure = figure_of(
        Plan.solve(
            examples, batch_size, steps=steps, noise_multiplier=sigma, delta=1e-5
        )
    )
    for axes in figure.axes:
        seen = set()
        for line in axes.get_lines():
            _, up = line.get_transform().transform(line.get_xydata()).T
            box = axes.get_window_extent()
            inside = (box.y0 - 1 <= up) & (up <= box.y1 + 1)
            if len(up) == 2 or np.any(inside):
                seen.add(line.get_label())
        legend = axes.get_legend()
        assert {text.get_text() for text in legend.get_texts()} <= seen


def test_the_plan_is_a_point_and_tan_a_dashed_line(drawn):
    lines = curves(drawn.axes[0])
    (point,) = [xy for label, xy in lines.items() if "the plan" in label]
    assert point.tolist() == [[0.5, PLAN.epsilon["rdp"]]]
    (flat,) = [xy for label, xy in lines.items() if "TAN" in label]
    assert (flat[:, 1] == PLAN.epsilon["tan"]).all()


def test_svg(tmp_path):
    plan = Plan.solve(1000, batch_size=1, steps=3, noise_multiplier=40.0)
    plan_figures.plot(plan, str(tmp_path / "new/plan.SVG"))
    assert ElementTree.parse(tmp_path / "new/plan.SVG").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    # At 221, η is 0.13, as on the left of the paper's Figure 2.
    ("batch_size", "sigma"),
    [(500, 0.15), (16_384, 9.4), (221, 1.2)],
)
def test_a_plan_is_on_its_curve(batch_size, sigma):
    plan = Plan.solve(50_000, batch_size, 2500, noise_multiplier=sigma, delta=1e-5)
    drawn = figure_of(plan)
    sigmas, epsilons = curves(drawn.axes[0])["$T$ = 2,500 (plan)"].T
    own = float(epsilons[sigmas == sigma][0])
    assert own == plan.epsilon["rdp"]
    assert (np.diff(epsilons) < 1e-3).all()


def test_the_right_panel_is_the_divergence_over_its_approximation(drawn):
    lines = curves(drawn.axes[1])
    per_step = tan.eta_step(PLAN.mechanism)
    assert "$\\sigma$ = 0.5 (plan)" in lines
    for sigma in (1.0, 2.0, 4.0):
        orders, ratios = lines[f"$\\sigma$ = {sigma:.3g}"].T
        q = np.sqrt(2) * sigma * per_step
        # The closed form at α = 2 (Mironov et al. 2019): log(1 + q²(e^{1/σ²} − 1)).
        exact = np.log1p(q**2 * np.expm1(sigma**-2)) / (2 * per_step**2)
        assert orders[0] == 2
        assert ratios[0] == pytest.approx(exact, rel=1e-6)
        assert (ratios[:4] < 1.2).all() == (sigma >= 2)


@pytest.mark.parametrize("by", ["pld", "rdp"])
def test_a_frontier_says_whose_epsilon_it_draws(by, monkeypatch):
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *a, **o: figures.append(figure)
    )
    point = Point(512, 0.5, 7.0, 1.0, True)
    plan = dataclasses.replace(PLAN, accountant=by, delta=1.0000004e-5)
    plan_figures.plot_frontier(plan, [point], "frontier.png")
    label = figures[0].axes[0].get_ylabel()
    assert label.endswith(f"= 1.00001e-05, by {by.upper()}")  # rounded up


def test_axes_are_labelled(drawn):
    left, right = drawn.axes
    assert left.get_xlabel() == r"noise multiplier $\sigma$"
    assert left.get_ylabel() == r"$\varepsilon$ at $\delta$ = 1e-05, by RDP"
    assert right.get_xlabel() == r"Rényi order $\alpha$"
    assert "g_" in right.get_ylabel()
    (one,) = (line for line in right.get_lines() if line.get_label() == "TAN")
    assert list(one.get_ydata()) == [1, 1]
    assert any("privacy wall" in text.get_text() for text in left.texts)


@pytest.mark.parametrize(
    ("batch_size", "sigma", "adjacency"),
    [
        (1000, 0.05, "replace-one"),
        (1, 40.0, "zero-out"),
    ],
)
def test_odd_plans_can_be_drawn(batch_size, sigma, adjacency, tmp_path):
    plan = Plan.solve(
        1000,
        batch_size=batch_size,
        steps=3,
        noise_multiplier=sigma,
        adjacency=adjacency,
    )
    plan_figures.plot(plan, tmp_path / "plan.png")
    with Image.open(tmp_path / "plan.png") as image:
        assert image.width > 1500
        assert len(image.convert("RGB").getcolors(2**20) or []) > 100


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape("must end in .png or .svg")):
        plan_figures.plot(PLAN, tmp_path / "plan.pdf")
    silent = Plan.solve(1000, batch_size=10, steps=3, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="without noise there is nothing to draw"):
        plan_figures.plot(silent, tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be in a folder, not in a file"):
        plan_figures.plot(PLAN, tmp_path / "file/new/plan.png")
