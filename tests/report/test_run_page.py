import contextlib
import html.parser
import io
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import written
from small_report import MARKER, Page, report, run_files, write_run

from tanager.privacy.shown import format_epsilon
from tanager.report import guarantee
from tanager.report.run_page import write_report


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The page of a private run, with its curves."""
    return report(tmp_path_factory.mktemp("run") / "run", *run_files(), drawn=True)


def test_guarantee_is_one_sentence_with_its_assumptions(text):
    result, words = run_files()[1], Page(text).words
    shown = math.ceil(1000 * result["epsilon"]) / 1000
    assert f"This model is (ε = {shown:g}, δ = 0.0001) -differentially private" in words
    assert "for each image, under zero-out" in words
    assert "by dp_accounting 0.6.0" in words
    assert "replaced by nothing. Its content is protected" in words
    times = guarantee.factor(result["epsilon"])
    assert f"at most e^ε = {times} times the probability" in words
    assert "NOT PRIVATE" not in words
    for stated in ("The guarantee is per image", "hyper-parameters", "secret seed"):
        assert stated in words


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"clip_gamma": None}, "to norm C = 1 and added"),
        ({"clip_gamma": 0.01}, "counts as C·g/(‖g‖ + 0.01)) and"),
        (
            {"adaptive_clipping": {"quantile": 0.5}},
            "to norm C = 1 at first, then to one that follows the 0.5-quantile of "
            "their norms (adaptive clipping, by noisy counts that are part of ε), and",
        ),
    ],
)
def test_the_style_of_clipping_is_said(field, said):
    result = written.RESULT | {"unit": "example"} | field
    assert said in guarantee.mechanism(result)


def test_what_epsilon_means_is_said_in_risks(text, tmp_path):
    words = Page(text).words
    assert f"What ε = {format_epsilon(run_files()[1]['epsilon'])} means" in words
    assert (
        "Take someone who guesses whether one image was in the training data. By a "
        "coin toss they are right 50 % of the time, with the model at most 65 %. If "
        "they may be wrong about 1 of 100 other images, they recognise at most 6.79 % "
        "of the members (without the model: 1 %)."
    ) in words
    # Rounded up: they are 1.2301 %, 30 % and 0.77001.
    assert "members recognised at 0.1 % false alarms 1.24 % 0.1 %" in words
    assert "members recognised minus false alarms 30 % 0 %" in words
    assert "μ of Gaussian DP 0.7701 (regret 0.012)" in words
    config, result, metrics = run_files()
    del result["risk"]  # as an older version left it
    assert (
        "members" not in Page(report(tmp_path / "old", config, result, metrics)).words
    )
    result = run_files(seed=0)[1]
    text = Page(report(tmp_path / "fixed", config, result, metrics)).words
    assert "members" not in text
    assert "μ of Gaussian DP, NOT guaranteed for this run" in text


def test_only_an_average_that_is_there_is_drawn(text, tmp_path):
    assert text.count("average of parameters</text>") == 1
    config, result, metrics = run_files()
    files = config | {"ema_decay": 0}, result, metrics
    alone = report(tmp_path, *files, drawn=True)
    assert alone.count("<svg") == text.count("<svg")
    for words in ("average of parameters", "of their average"):
        assert words in text
        assert words not in alone


def test_epsilon_is_never_rounded_down(tmp_path):
    config, result, metrics = run_files()
    for epsilon, shown in ((3.0, "3"), (0.12341, "0.1235"), (123.41, "123.5")):
        claimed = guarantee.claim(result | {"epsilon": epsilon})
        assert claimed == f"(ε = {shown}, δ = 0.0001)"
    result["epsilon"] = 2.9900001
    words = Page(report(tmp_path, config, result, metrics)).words
    assert "(ε = 2.991, δ" in words


def test_every_number_is_there(text):
    result, words = run_files()[1], Page(text).words
    expected = [
        "94.2 %",
        "96.4 %",
        "26,010",
        "1,437",
        f"q = {256 / 1437:.6g}",
        "σ = 1.7",
        "200 updates",
        f"{result['eta']:.6g}",
        f"{result['eta_step']:.6g}",
        f"{result['total_noise']:.6g}",
        f"{math.ceil(1000 * result['epsilon_rdp']) / 1000:g}",
        "613.2",
        "1 min 23 s",
        "name sgd, learning_rate 2",
        "crop_padding 1",
        "momentum 0.9",
        "tanager 0.1.0",
    ]
    for index in range(10):
        expected += [
            f"{index} {30 + index} {84.6 + 1.2 * index:.1f} %",
            f"{80.1 + 1.3 * index:.1f} %",
        ]
    assert [text for text in expected if text not in words] == []


def test_page_refers_to_nothing_outside_itself(text):
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "a"}
    for _, attributes in page.tags:
        for name in ("href", "xlink:href", "src", "srcset", "action", "data"):
            assert (attributes.get(name) or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|//www|@import|url\((?!#)", text)
    policies = [each for _, each in page.tags if "http-equiv" in each]
    assert policies[0]["content"].startswith("default-src 'none'")


def test_the_page_can_be_read_aloud(text):
    tags = Page(text).tags
    assert ("html", {"lang": "en"}) in tags
    assert [tag for tag, _ in tags if tag in ("h1", "h2", "h3")][:2] == ["h1", "h2"]
    assert sum(tag == "h1" for tag, _ in tags) == 1
    for tag, attributes in tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert attributes["aria-label"].endswith(" against update")
        if tag == "th":
            assert attributes["scope"] in ("row", "col")


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [
        (0.0, "1"),
        (3.0, "20.09"),
        (10.0, "22,030"),
        (800.0, "infinite"),
        (3.9991, "54.6"),
    ],
)
def test_e_to_the_printed_epsilon_is_rounded_up(epsilon, shown):
    assert guarantee.factor(epsilon) == shown


def measured(count):
    """Measures of a run as training leaves them: each class has one mistake."""

    def share(value):
        return {"value": value, "low": value - 0.04, "high": value + 0.03}

    matrix = [[0] * count for _ in range(count)]
    for k in range(count):
        matrix[k][k], matrix[k][(k + 1) % count] = 29 + k, 1
    whole = {
        "examples": 345,
        "accuracy": share(0.9638),
        "top_5_accuracy": share(0.9998),
        "balanced_accuracy": share(0.9512),
        "macro_f1": share(0.9417),
        "auroc": share(0.9925),
        "majority_share": 0.113,
        "majority_class": "9",
        "confusion_matrix": matrix,
        "per_class": [
            {"class": str(k), "accuracy": share(0.9), "auroc": 0.98}
            for k in range(count)
        ],
    }
    last = whole | {"confusion_matrix": None, "per_class": None}
    return {"measures": {"parameters": last, "average": whole}, "date": "2026-11-26"}


def test_how_good_it_is_has_intervals_and_a_base_line(tmp_path):
    config, result, metrics = run_files()
    text = report(tmp_path / "run", config, result | measured(10), metrics)
    words = Page(text).words
    for said in (
        "digits Image classifier, network small-cnn · trained until 26 November 2026",
        "accuracy: images named right 96.4 % 92.4 to 99.4 % 96.4 %",
        "top-5 accuracy: the class is among the five likeliest 100.0 %",
        "of those found 95.1 % 91.1 to 98.1 % 95.1 %",
        "AUROC: one class against the rest, mean 99.2 %",
        "always “9”, the largest class 11.3 %",
        "Test figures are not covered by ε.",
        "0 1 2 3 4 5 6 7 8 9 0 29 1 0 0 0 0 0 0 0 0 1 0 30 1 0",
        "0 30 84.6 % 86.0 to 93.0 % 98.0 % 80.1 %",
    ):
        assert said in words, said


def test_intervals_that_are_not_there_are_explained(tmp_path):
    config, result, metrics = run_files()
    found = measured(10)
    assert "same value" not in report(
        tmp_path / "some", config, result | found, metrics
    )
    found["measures"]["average"]["macro_f1"] = {"value": 1.0, "low": None, "high": None}
    words = Page(report(tmp_path / "none", config, result | found, metrics)).words
    assert "all samples gave the same value" in words


def test_numbers_of_the_confusion_matrix_are_readable_in_both_schemes():
    style = (Path(guarantee.__file__).parent / "templates/style.css").read_text()
    schemes = re.findall(
        r"color-scheme: light dark;.*?}|prefers-color-scheme: dark.*?}",
        style,
        re.DOTALL,
    )
    assert len(schemes) == 2
    (divisor,) = re.findall(r"calc\(var\(--share\) / (\d+)\)", style)
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): #(\w{6})", scheme))
        red = {name: np.array([*bytes.fromhex(c)]) for name, c in colours.items()}
        for hue in ("raw", "average"):
            full = red["paper"] + (red[hue] - red["paper"]) / int(divisor)
            assert contrast(full, red["ink"]) >= 4.5


def contrast(one, other):
    """Contrast of WCAG 2, of sRGB."""
    linear = [
        np.where(c > 10, ((c / 255 + 0.055) / 1.055) ** 2.4, c / 3295)
        for c in (one, other)
    ]
    dark, light = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in linear)
    return (light + 0.05) / (dark + 0.05)


def test_of_many_classes_the_worst_are_shown(tmp_path):
    names = [f"kind {k}" for k in range(25)]
    config, result, metrics = run_files(classes=names)
    text = report(tmp_path / "run", config, result | measured(25), metrics)
    words = Page(text).words
    assert "The 10 worst of 25 classes" in words
    assert "kind 0 30 84.6 % kind 1 (1)" in words
    assert "matrix" not in {each.get("class") for _, each in Page(text).tags}


@pytest.mark.parametrize(
    ("dataset", "given", "title"),
    [
        ("folder", "/home/alice/secret/hospital/", "hospital"),
        ("folder", "..", "a folder of images"),
        ("folder", None, "folder"),
        ("cifar10", "/home/alice/secret/cifar", "cifar10"),
        (None, None, "small-cnn"),
    ],
)
def test_the_title_is_the_data_set_and_no_private_path(tmp_path, dataset, given, title):
    config, result, metrics = run_files()
    config |= {"dataset": dataset, "study": {"path": "/home/alice/s", "trial": 3}}
    config["recipe"] |= {"data": given, "options": [{"a": "/home/alice/b"}]}
    text = report(tmp_path, config, result, metrics)
    assert f"<h1>{title}</h1>" in text
    assert "alice" not in text
    assert "secret/" not in text


def test_too_few_images_for_the_noise_are_named(text, tmp_path):
    assert "few for this much noise" not in Page(text).words
    config, result, metrics = run_files()
    few = result | {"examples": 40}
    found = Page(report(tmp_path / "run", config, few, metrics)).words
    assert "40 examples of 10 classes are few for this much noise" in found


def test_an_account_is_not_said_to_count_a_run_that_it_does_not(tmp_path):
    config, result, metrics = run_files()
    total = {"epsilon": 9, "delta": 1e-5, "adjacency": "zero-out", "accountant": "pld"}
    for name, account in (("none", None), ("one", total)):
        found = result | {"account": account}
        words = Page(report(tmp_path / name, config, found, metrics)).words
        assert ("No account counts this run" in words) == (account is None)
        assert ("all runs on the same data spent" in words) == (account is not None)


def test_how_the_settings_were_chosen_and_how_files_were_read(tmp_path):
    config, result, metrics = run_files()
    reading = {"layout": "class folders", "conversion": "upright-8-bit"}
    config["reading"] = reading | {"size": "given", "not_read": {".txt": 20}}
    config["reading"]["split"] = "by path"
    config["automatic"] = {
        "steps": "300, because <it> suits N = 960",
        "image_size": "32, because",
    }
    words = Page(report(tmp_path / "a", config, result, metrics)).words
    chosen = "from public numbers alone, and not from the images: steps 300, because"
    assert f"{chosen} <it> suits N = 960" in words
    assert "The settings are those of the recipe digits" in words
    assert "each try spent privacy that the ε of this run does not count" in words
    assert "Files: class folders. Each image was turned upright" in words
    assert "not read, by ending: .txt 20." in words
    assert "The size is a default of tanager's." in words
    assert "some of that person's images were trained on" in words
    config["reading"]["split"] = "by person"
    config |= {"recipe": None, "automatic": {}}
    account = {"epsilon": 5.4321, "delta": 1e-4, "adjacency": "zero-out"}
    result["account"] = account | {"accountant": "pld"}
    words = Page(report(tmp_path / "b", config, result, metrics)).words
    assert "The program that trained it set the settings." in words
    assert "left open" not in words
    assert "some of that person's images" not in words
    assert "The person who trained it chose the size" in words
    assert "had spent ε = 5.433 at δ = 0.0001 together" in words


@pytest.mark.parametrize("damage", ["matrix", "date"])
def test_damaged_measures_are_refused(tmp_path, damage):
    config, result, metrics = run_files()
    result |= measured(10)
    if damage == "date":
        result["date"] = "soon"
    else:
        del result["measures"]["average"]["confusion_matrix"][0][0]
    with pytest.raises(ValueError, match=r"result\.json.*claims what cannot be"):
        report(tmp_path, config, result, metrics)


def test_each_table_scrolls_inside_itself(text):
    """And nothing has a width that a phone does not have."""
    tables = [m.start() for m in re.finditer("<table", text)]
    assert tables
    for start in tables:
        assert text[:start].endswith("<div class=scroll>")
    style = "".join(Page(text).style)
    assert ".scroll { overflow-x: auto; }" in style
    assert not re.search(r"(?<!max-)(?<!-)width: *[0-9.]{3,}(px|pt)", style)


def test_light_dark_and_print(text):
    style = "".join(Page(text).style)
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    used = set(re.findall(r"var\((--[a-z-]+)\)", text)) - {"--hue", "--share"}
    for scheme in style.split(":root {")[1:]:
        assert used <= set(re.findall(r"(--[a-z-]+):", scheme.split("}")[0]))


def test_curves_are_drawn_with_one_point_per_line_of_metrics(text):
    page, metrics = Page(text), run_files()[2]
    for colour in ("raw", "average", "epsilon"):
        paths = [
            attributes["d"]
            for tag, attributes in page.tags
            if tag == "path" and f"stroke: var(--{colour})" in attributes["style"]
        ]
        counts = [len(re.findall("[ML]", path)) for path in paths]
        assert max(counts) == len(metrics)
    assert "test accuracy (%)" in page.words
    assert "ε spent" in page.words


def test_what_comes_from_outside_is_escaped(tmp_path):
    evil = "<script>alert('é')</script>"
    config, result, metrics = run_files(classes=[evil, "a & b", "<b>"])
    config |= {"model": evil, "dataset": f"{evil}\"'", "optimizer": evil}
    config["recipe"][evil] = evil
    result["versions"] = {evil: evil}
    text = report(tmp_path, config, result, metrics)
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "b" not in {tag for tag, _ in page.tags}
    assert "<script" not in text
    assert page.words.count(evil) >= 7
    assert "a & b" in page.words


def test_fixed_seed_is_loudly_not_private(tmp_path):
    config, result, metrics = run_files(seed=0)
    page = Page(report(tmp_path, config, result, metrics))
    assert ("section", {"class": "danger", "role": "alert"}) in page.tags
    assert "NOT PRIVATE" in page.words
    assert "The seed was fixed by a person" in page.words
    assert "-differentially private" not in page.words
    assert "guarantee" not in {each.get("class") for _, each in page.tags}
    assert "ε no guarantee" in page.words
    assert "NOT guaranteed for this run" in page.words


@pytest.mark.parametrize(("noise", "cautioned"), [(0.4, True), (1.7, False)])
def test_a_huge_epsilon_is_not_sold_as_protection(tmp_path, noise, cautioned):
    config, result, metrics = run_files(noise=noise)
    assert (result["epsilon"] > 20) is cautioned
    words = Page(report(tmp_path, config, result, metrics)).words
    assert ("protects next to nothing" in words) is cautioned


def test_no_noise_is_not_private(tmp_path):
    config, result, metrics = run_files(noise=0.0)
    assert result["epsilon"] == math.inf
    words = Page(report(tmp_path, config, result, metrics)).words
    assert "NOT PRIVATE" in words
    assert "No noise was added" in words
    assert "∞" not in words and "How to verify" not in words


def test_replace_one_says_so(tmp_path):
    config, result, metrics = run_files(adjacency="replace-one")
    words = Page(report(tmp_path, config, result, metrics)).words
    assert "private for each image, under replace-one" in words
    assert "another image is in its place" in words
    assert "none under replace-one" in words


def test_run_without_test_set(tmp_path):
    config, result, metrics = run_files()
    metrics = [{name: line[name] for name in ("step", "epsilon")} for line in metrics]
    result |= {"test_accuracy": None, "test_accuracy_ema": None, "per_class": None}
    config |= {"classes": None, "recipe": None, "dataset": None}
    page = Page(report(tmp_path, config, result, metrics, drawn=True))
    assert "No accuracy was measured" in page.words
    assert "not measured" in page.words
    assert "Each class" not in page.words
    assert "test accuracy (%)" not in page.words


def test_class_without_examples_and_broken_loss(tmp_path):
    config, result, metrics = run_files()
    result["per_class"][3] |= {"examples": 0, "accuracy": None, "accuracy_ema": None}
    metrics[4]["test_accuracy"] = math.nan
    page = Page(report(tmp_path, config, result, metrics, drawn=True))
    assert "3 0 none none" in page.words
    assert "nan" not in page.words.lower()


def test_run_without_metrics(tmp_path):
    folder = write_run(tmp_path / "run", *run_files())
    (folder / "metrics.jsonl").unlink()
    assert "No metrics were recorded" in Page(write_report(folder).read_text()).words


def test_nothing_of_private_gets_in_or_is_read(tmp_path):
    folder = write_run(tmp_path / "run", *run_files())
    text = write_report(folder).read_text()
    assert MARKER not in text
    shutil.rmtree(folder / "private")
    assert write_report(folder).read_text() == text


def test_page_is_replaced_whole(tmp_path):
    folder = write_run(tmp_path / "run", *run_files())
    (folder / "report.html").write_text("old")
    kept = os.stat(folder / "report.html").st_ino
    assert write_report(folder).stat().st_ino != kept
    names = {"config.json", "metrics.jsonl", "private", "report.html", "result.json"}
    assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize("adjacency", ["zero-out", "add-or-remove-one", "replace-one"])
def test_verification_code_gives_the_epsilon_of_the_page(tmp_path, adjacency):
    config, result, metrics = run_files(adjacency=adjacency)
    text = report(tmp_path, config, result, metrics)
    code = html.unescape(text.split("<pre id=verify>")[1].split("</pre>")[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert float(printed.getvalue()) == pytest.approx(result["epsilon"], rel=1e-3)
