"""The code of the README and of every page in docs runs as it stands, in order.

What is checked of a page beyond that its code runs, and that it prints what it shows,
is a function here.
"""

import re

import jax
import pytest

import pages
from switch import FULL
from tanager import recipes
from tanager.cli import main
from tanager.privacy.plan import default_delta


# Fewer steps (`make test-full` has all; what the first page shows, `test_runner` too).
SHORTER = {
    "docs/start.md": {
        "train --out runs/demo": "train --model linear --steps 30 --out runs/demo",
        "digits: small-cnn": "digits: linear",
        "multiplier 5.44067": "multiplier …",
        "step 10/150  ε = 0.6673": "step 10/30  ε = …",
        "step 150/150  ε = 3  test accuracy 9": "step 30/30  ε = 3  test accuracy ",
        "was spent; test accuracy 9": "was spent; test accuracy ",
        "150 steps, ε = 3.00": "30 steps, ε = 3.00",
        "```text printed\n0\n": "```text printed\n…\n",
    },
    "docs/images.md": {
        "skin --epsilon 4\n": "skin --epsilon 4 --steps 10\n",
        "step 60/60": "step 10/10",
        "--groups patient --epsilon 8": "--groups patient --epsilon 8 --steps 10",
    },
    "docs/training.md": {
        'create("small-cnn"': 'create("linear"',
        "steps=40": "steps=8",
        "evaluate_every=20,": "evaluate_every=4,",
        "20 steps: ε = 2.12": "4 steps: ε = …",
        "40 steps: ε = 3.00": "8 steps: ε = 3.00",
    },
    "docs/pretrained.md": {
        'models.create(\n        "vit-tiny-16",\n        classes=classes,\n'
        "        image_shape=(side, side, 3),": (
            "models.VisionTransformer(\n        models.Variant(32, 1, 2), 16, classes, "
            "(side, side, 3),"
        ),
    },
    "docs/tutorials.md": {"steps=25": "steps=3"},
}


def readme(printed, folder):
    assert float(re.findall(r"ε = ([\d.]+)", printed)[0]) <= 3.0
    assert 0 < float(re.findall(r"ε so far: ([\d.]+)", printed)[0]) < 3.0
    assert (folder / "runs/mine/report.html").exists()


def searching(printed, folder):
    assert 0 < float(re.findall(r"multiplier ([\d.]+)", printed)[0]) < 10
    assert 7.9 < float(re.findall(r"ε = ([\d.]+)", printed)[0]) <= 8


def pretrained(printed, folder):
    lines = printed.splitlines()
    published = (
        "hf:timm/vit_base_patch16_224.augreg_in21k 21843 (0.5, 0.5, 0.5) apache-2.0"
    )
    assert published in lines
    # In the block 4·(32+96) + 4·(32+32) + 2·4·(32+128), and the head of 32·10 + 10.
    assert str(512 + 256 + 1280 + 330) in lines
    assert "Linear" in lines
    first = lines.index("('tanager', 'timm', 'huggingface', 'huggingface-backbone')")
    resized = "positions resized from 17 to 37 (bicubic)"
    assert lines[first + 1] == f"timm ['head set to zero', '{resized}']"
    refused = "read as timm, do not fit this VisionTransformer:"
    (at,) = (at for at, line in enumerate(lines) if refused in line)
    assert re.fullmatch(r"a \d", lines[at - 1])
    differs = r"  differs: head\.weight is \[1000, (\d+)\], must be \[10, \1\]"
    assert re.fullmatch(differs, lines[at + 1])


def audit(printed, folder):
    of_runs, of_scores = printed.split("ε is at least")
    claimed, least, *of_many = re.findall(r"[\d.]+\d", of_runs)
    assert all(0 <= float(bound) < 6 for bound in of_many)
    assert len(of_many) == 2
    assert 0 <= float(least) <= float(claimed)
    # Two Gaussians two standard deviations apart: 37 % at 1 %, and ln 37.
    assert re.match(r" 2\.\d\d\nfinds 38 % with 1 % of false alarms\n", of_scores)


def tutorials(printed, folder):
    text = (pages.ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
    for name in ("Flax linen", "Flax NNX", "Equinox", "Haiku"):
        section = text.split(f"## {name}\n")[1].split("\n## ")[0]
        (said,) = re.findall(rf"^\| {name} \| (\d+) \|", text, flags=re.M)
        assert section.count("# private\n") == int(said), name


CHECKS = {
    check.__name__: check for check in (readme, pretrained, searching, audit, tutorials)
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", pages.PAGES, ids=lambda page: str(page.relative_to(pages.ROOT))
)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    name = str(page.relative_to(pages.ROOT))
    monkeypatch.chdir(tmp_path)
    if page.name == "pretrained.md":
        assert main(["train", "digits", "--model", "linear", "--steps", "2"]) == 0
        capsys.readouterr()
    # Tutorials are written for JAX's default, and Flax and Optax count on it.
    with jax.numpy_dtype_promotion(
        "standard" if page.stem == "tutorials" else "strict"
    ):
        pages.run(page, monkeypatch, {} if FULL else SHORTER.get(name, {}))
    check = CHECKS.get(page.stem.lower())
    if check is not None and page.parent.name != "api":
        check(capsys.readouterr().out, tmp_path)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```python\nassert 1 == 2, 'no'\n```\n", "no"),
        ("```python\nprint('a 1')\n```\n\n```text printed\na 2\n```\n", "a 1"),
        ("```sh\ntanager plan --examples 0\n```\n", "examples"),
        ("```sh full\ntanager train digits --no-such-option 1\n```\n", ""),
        ("```sh wrong\ntanager --version\n```\n", "what does 'wrong' mean"),
        (
            "```sh\nmkdir own\n```\n```sh full\ntanager train --data own\n```\n",
            "['own'] are the page's own",
        ),
    ],
)
def test_a_page_that_lies_is_found(page, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page)
    with pytest.raises((AssertionError, SystemExit)) as failure:
        pages.run(tmp_path / "page.md", monkeypatch)
    output = capsys.readouterr()
    assert said in str(failure.value) + output.out + output.err


def test_what_differs_between_runs_may_be_left_open(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    code = "```python\nprint('ε = 1.234, in 5 s')\n```\n"
    shown = "```text printed\nε = 1.…, in …\n```\n"
    (tmp_path / "page.md").write_text(code + shown)
    pages.run(tmp_path / "page.md", monkeypatch)


def said(pattern):
    """Return what every page says where the pattern is."""
    texts = (page.read_text(encoding="utf-8") for page in pages.PAGES)
    return [found for text in texts for found in re.findall(pattern, text)]


def test_a_limit_on_a_page_lets_one_run_of_that_epsilon_begin():
    limits = said(r"account limit .*--epsilon \S+ --delta (\S+)")
    usual = default_delta(2000)  # N of the plan on choosing.md
    assert [float(delta) for delta in limits] == [usual, usual]


def test_more_images_are_measured_whole():
    measured = said(r"--data MORE[^`#\n]*")
    assert len(measured) == 2
    assert all("--split all" in words for words in measured)


def test_no_page_installs_from_the_package_index():
    """The program is not there: an extra is installed from the source's folder."""
    assert said(r".*tanager-dp\[.*") == []


def test_the_defaults_of_choosing_are_those_of_the_recipes():
    rows = said(r"\| `--(epsilon 4|delta 5e-5|adjacency replace-one)` \| (.*) \|")
    shown = {flag.split()[0]: default for flag, default in rows}
    folder, digits = recipes.get("folder").recipe, recipes.get("digits").recipe
    assert shown["epsilon"] == f"the recipe's: {folder.epsilon:g} for your own images"
    assert folder.delta is None
    assert digits.delta == 1e-4 > default_delta(1437)
    assert shown["delta"].startswith("the recipe's; for your own images 0.1/N")
    assert shown["adjacency"] == f"`{folder.adjacency}`"


def test_the_first_page_has_the_speed_that_was_measured_last():
    (measured,) = said(r"(?s)## Measured again\n.*?## ")
    rows = (r"tanager\*\*", "Opacus", "JAX-Privacy, tanager's options")
    times = [re.findall(rf"{row} \| [\d.]+ \(([\d.]+)\)", measured) for row in rows]
    (shown,) = said(r"\| speed of a private step;.*batch 32, CPU\) \| \[(.*)\|")
    assert re.findall(r"\d\.\d\d", shown) == [f"{1 / float(t):.2f}" for (t,) in times]


def test_a_choice_of_automatic_settings_names_what_was_not_chosen():
    """A row that says "else 150 of all images" does not say what else was tried."""
    (table,) = said(r"\| choice \| images; ε [^\n]*\n((?:\|.*\n)+)")
    choices = [row.split("|")[1] for row in table.splitlines()[1:]]
    assert all(", not " in choice for choice in choices if choice.strip())
