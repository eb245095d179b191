"""A private search: what it releases, what it hides, and what it spends."""

import dataclasses
import functools
import json
import logging
import math
import os
import shutil
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open
from scipy import stats

from tanager import recipes
from tanager._cache import cache_folder
from tanager.cli import main
from tanager.commands.spent import recorded, spent_by
from tanager.privacy.account import Account
from tanager.privacy.selection import PrivateSearch, Selection
from tanager.report.guarantee import recomputation
from tanager.search import private
from tanager.search.private import (
    _SCORE_GRID,
    calibrate_selection,
    noisy_count,
    search_privately,
)
from tanager.search.space import Space
from tanager.seed import Seed
from tanager.training import charging
from tanager.training.export import export
from tanager.training.run_folder import seed_of


PROGRAMS = "jax_compilation_cache_dir"
HELD_OUT = 140
LEFT = 1437 - HELD_OUT


@pytest.fixture(scope="module", autouse=True)
def calibrated_once():
    """Each search is calibrated once, however often its command is run."""
    with pytest.MonkeyPatch.context() as patch:
        calibrate = functools.cache(PrivateSearch.calibrate)
        patch.setattr(PrivateSearch, "calibrate", calibrate)
        yield


def settings_of(selection=Selection(3), vary="learning-rate=0.25,0.5,1", **changes):  # noqa: B008
    fields: dict[str, Any] = {"model": "linear", "steps": 4, "strategy": "bk"}
    fields["validation_examples"] = HELD_OUT
    fields["batch_size"] = LEFT  # without subsampling, ε takes a tenth of the time
    recipe = dataclasses.replace(recipes.get("digits").recipe, **fields | changes)
    space = Space.parse([vary])
    return calibrate_selection("digits", recipe, space, selection, LEFT)


@pytest.fixture(scope="module")
def settings(calibrated_once):
    return settings_of()


def draws(patch, number):
    patch.setattr(Selection, "draw", lambda self, seed: number)


@pytest.fixture(scope="module")
def released(tmp_path_factory, settings):
    """A search of three runs, killed as the second began: its folder and result."""
    out, right, made = tmp_path_factory.mktemp("private") / "search", private._right, []

    def killed(folder, recipe, settings):
        made.append((folder.name, recipe.learning_rate))
        if len(made) == 2:
            raise KeyboardInterrupt
        return right(folder, recipe, settings)

    with pytest.MonkeyPatch.context() as patch:
        draws(patch, 3)
        patch.setattr(private, "_right", killed)
        with pytest.raises(KeyboardInterrupt):
            search_privately(out, settings)
        assert not (out / "result.json").exists()
        winner = search_privately(out, settings)
    assert made[2:4] == made[:2]
    assert [name for name, _ in made[2:]] == ["0000", "0001", "0002"]
    return out, winner


def read(path):
    return json.loads(path.read_text())


def of_weights(path):
    with safe_open(path, "numpy") as file:
        return json.loads(file.metadata()["tanager"])


def test_each_run_is_calibrated_for_the_whole_search(settings):
    assert settings.name == settings.to_json()["recipe"]["name"] == "digits"
    assert settings.epsilon <= 3
    assert settings.search.epsilon(settings.delta) == settings.epsilon
    assert settings.recipe.noise_multiplier == settings.search.run.noise_multiplier
    alone = settings_of(Selection(1)).recipe.noise_multiplier
    assert alone is not None and settings.recipe.noise_multiplier is not None
    assert settings.recipe.noise_multiplier > alone
    assert settings.delta == 1e-4


def test_where_a_search_is_does_not_identify_it(settings):
    recipe = dataclasses.replace(settings.recipe, out="moved")
    moved = dataclasses.replace(settings, recipe=recipe)
    assert moved.recipe.out != settings.recipe.out
    assert moved.to_json() == settings.to_json()


@pytest.mark.slow
def test_the_best_run_is_released_under_the_guarantee_of_the_search(
    released, settings, tmp_path
):
    out, winner = released
    files = {"study.json", "config.json", "result.json", "report.html"}
    files |= {"model.safetensors", "model-ema.safetensors", "private"}
    assert {path.name for path in out.iterdir()} == files
    assert (out / "private").stat().st_mode & 0o777 == 0o700
    runs = sorted((out / "private/runs").iterdir())
    assert len(runs) == 3
    # The winner has the largest score, noise and all.
    seed = Seed(bytes.fromhex(read(out / "private/seed.json")["secret"]))
    scores = []
    for number, run in enumerate(runs):
        count = round(read(run / "result.json")["test_accuracy_ema"] * HELD_OUT)
        scores.append(noisy_count(count, settings.search, seed, number) / HELD_OUT)
    assert winner.noisy_accuracy == pytest.approx(max(scores))
    best = runs[int(np.argmax(scores))]
    rate = read(best / "config.json")["recipe"]["learning_rate"]
    assert winner.values == {"learning_rate": rate}
    # The guarantee is that of the search, wherever it is written.
    result, kept = read(out / "result.json"), read(best / "result.json")
    assert result["private"] is True and "private_search" not in result
    assert result["epsilon"] == winner.epsilon == settings.epsilon
    assert kept["epsilon"] < winner.epsilon
    for name in ("model.safetensors", "model-ema.safetensors"):
        told = of_weights(out / name)
        assert (told["epsilon"], told["accountant"]) == (settings.epsilon, "rdp")
    page = (out / "report.html").read_text()
    assert "best of a secret random number of such runs" in page
    # Nothing exact of the held-out examples, nor which run it was, is outside private/.
    exact = {name for name in kept if name.startswith("test_")}
    assert not result.keys() & (exact | {"per_class", "seconds", "wait_fraction"})
    assert "ε of the whole search, by RDP" in page and "by PLD" not in page
    assert "held-out accuracy, with noise" in page
    assert "next to this page" not in page
    assert "No metrics were recorded" not in page
    for path in out.iterdir():
        if path.is_file():
            assert b"private/runs" not in path.read_bytes(), path
    assert "private_search" not in (out / "config.json").read_text()
    card = export(out, tmp_path / "exported")
    described = read(card / "config.json")["tanager"]
    assert described["guarantee"]["epsilon"] == settings.epsilon
    assert described["guarantee"]["search"] == {"mean": 3.0, "shape": 1.0}
    told = (card / "README.md").read_text()
    assert "(of the whole search)" in told
    assert "best of a secret random number of such runs" in told
    assert f"on {HELD_OUT} held-out examples" in told
    assert f"{100 * winner.noisy_accuracy:.1f} %" in told
    assert "held-out images are protected as the others are" in told
    assert "PLD" not in told
    forged = shutil.copytree(out, tmp_path / "forged")
    (forged / "result.json").write_text(json.dumps(result | {"epsilon": 0.1}))
    with pytest.raises(ValueError, match=r"= 0\.1 .* its study\.json give"):
        export(forged, tmp_path / "refused")


@pytest.mark.slow
def test_the_same_call_again_changes_nothing_and_completes_the_report(
    released, settings
):
    """It may have been killed after result.json and before the report."""
    out, winner = released
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert search_privately(out, settings) == winner
    assert (out / "report.html").read_text() == page


@pytest.mark.slow
def test_the_report_computes_epsilon_again(released, settings, capsys):
    result = read(released[0] / "result.json")
    run = dataclasses.replace(settings.search.run, sample_rate=0.4)
    sampled = dataclasses.replace(settings.search, run=run)
    for search, found in (
        (settings.search, result),
        (sampled, result | {"sample_rate": 0.4}),
    ):
        exec(recomputation(found), {})
        again = float(capsys.readouterr().out.splitlines()[-1])
        assert again == pytest.approx(search.epsilon(settings.delta), rel=1e-3)


@pytest.mark.slow
def test_a_run_of_a_private_search_claims_nothing_of_its_own(released, tmp_path):
    for run in (released[0] / "private/runs").iterdir():
        assert read(run / "config.json")["private_search"] is True
        assert read(run / "result.json")["private"] is False
        assert of_weights(run / "model.safetensors")["private"] is False
        page = (run / "report.html").read_text()
        assert "one of the runs of a private search" in page
        assert "Alone these settings spend" in page
        assert "-differentially private" not in page
        with pytest.raises(ValueError, match="one of the runs of a private search"):
            export(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_no_run_begins_in_the_folder_of_a_search(released, tmp_path, capsys):
    out = shutil.copytree(released[0], tmp_path / "search")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    words = ["train", "digits", "--model", "linear", "--steps", "4"]
    assert main([*words, "--out", str(out)]) == 2
    assert "holds a search" in capsys.readouterr().err
    assert before == {
        path: path.read_bytes() for path in out.rglob("*") if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("always::UserWarning")
def test_neither_output_nor_times_nor_caches_tell_the_number_of_runs(
    tmp_path, monkeypatch, capfd, caplog
):
    """Nor does a second start of a search that was stopped, or a third of its end."""
    right, cache = private._right, tmp_path / "caches"
    caplog.set_level(logging.INFO, "jax._src.compilation_cache")
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(cache))
    words = ["search", "digits", "--private", "--trials", "2", "--steps", "2"]
    words += ["--strategy", "bk", "--vary", "learning-rate=0.5,1", "--model", "linear"]
    # Each run warns of so large an ε and δ.
    words += ["--epsilon", "40", "--delta", "0.01", "--batch-size", str(LEFT)]
    words += ["--validation-examples", str(HELD_OUT)]
    seen = []
    for number in (1, 2):
        made, out = [], tmp_path / str(number)

        def stopped(folder, *arguments, made=made):
            logging.getLogger("jax").error("as each run may")
            found = right(folder, *arguments)
            os.write(1, b"of a library in C\n")
            made.append(folder)
            if len(made) == 1:
                raise KeyboardInterrupt
            return found

        draws(monkeypatch, number)
        monkeypatch.setattr(private, "_right", stopped)
        codes = [main([*words, "--out", str(out)]) for _ in range(3)]
        assert codes == [130, 0, 0]
        assert len(list((out / "private/runs").iterdir())) == number
        printed = capfd.readouterr()
        assert len(printed.out.splitlines()) == 2 * 4
        assert "run has ended" not in printed.err
        assert not caplog.records  # a handler may write to a file, or to a notebook
        seen.append(printed.err)
        times = {path.stat().st_mtime_ns for path in (*out.iterdir(), out)}
        assert len(times) == 1
        assert "warning" in (out / "private/output.txt").read_text()
    assert seen[0] == seen[1]
    assert not cache.exists() or not list(cache.rglob("*clipping*"))


@pytest.mark.slow
def test_which_run_won_is_not_told_by_how_it_was_clipped(
    tmp_path, settings, monkeypatch
):
    """What one run measures, or another program meanwhile, the next would know."""
    cache, out, worth = tmp_path / "caches", tmp_path / "search", []
    monkeypatch.setenv("TANAGER_CACHE_DIR", str(cache))
    measure = "tanager.clipping.planning.autotune.Timings.measure"
    monkeypatch.setattr(measure, lambda *given: worth.append(given[4]))
    right = private._right

    def followed(*of):
        found = right(*of)
        assert cache_folder() == out / "private/cache"
        assert getattr(jax.config, PROGRAMS) == str(cache_folder() / "programs")
        cache.mkdir(exist_ok=True)
        (cache / "clipping-0.json").write_text("{}")
        return found

    monkeypatch.setattr(private, "_right", followed)
    draws(monkeypatch, 2)
    recipe = dataclasses.replace(settings.recipe, strategy="auto")
    before = getattr(jax.config, PROGRAMS)
    search_privately(out, dataclasses.replace(settings, recipe=recipe))
    assert worth == [0.0, 0.0]
    assert (cache_folder(), getattr(jax.config, PROGRAMS)) == (cache, before)
    assert not list((out / "private/cache").glob("clipping-*"))
    runs = [read(run / "config.json") for run in (out / "private/runs").iterdir()]
    told = read(out / "config.json")
    secret = seed_of(out)
    assert secret is not None
    assert told.pop("charge") == charging.id_of(out, secret)  # of no one run
    assert {*told} == {*private._SETTINGS} < {*runs[0]} - {"clipping", "devices"}
    first, second = ({name: run[name] for name in told} for run in runs)
    for config in (first, second, told):
        for name in ("recipe", "optimizer"):  # with what was drawn, and the folder
            del config[name]
    assert first == second == told


def test_the_search_is_charged_once_whatever_its_number_of_runs(
    tmp_path, settings, monkeypatch
):
    account, out = Account(tmp_path / "account"), tmp_path / "search"
    recipe = dataclasses.replace(settings.recipe, account=str(account.path))
    settings = dataclasses.replace(settings, recipe=recipe)
    account.set_limit(0.9 * settings.epsilon, settings.delta)
    with pytest.raises(ValueError, match=r"has a limit of .*what fits is"):
        search_privately(out, settings)
    assert not out.exists()
    account.set_limit(1.1 * settings.epsilon, settings.delta)

    def killed(folder, recipe, settings):
        [charge] = account.read().charges.values()
        assert (charge.what, charge.selection) == ("search", Selection(3))
        assert charge.mechanisms == (settings.search.run,)
        raise KeyboardInterrupt

    draws(monkeypatch, 2)
    with monkeypatch.context() as patch:
        patch.setattr(private, "_right", killed)
        with pytest.raises(KeyboardInterrupt):
            search_privately(out, settings)
    right = private._right

    def deleting(*of):
        """In its place is one without room; what was spent is written all the same."""
        account.path.unlink(missing_ok=True)
        account.set_limit(0.9 * settings.epsilon, settings.delta)
        return right(*of)

    monkeypatch.setattr(private, "_right", deleting)
    search_privately(out, settings)
    assert len(account.read().charges) == 1
    # Added by hand, from study.json, it is the same charge.
    own, charge = spent_by(Account(account.path), out, 1e-3)
    assert own.unit == "example" and account.read().holds(charge)
    assert recorded(out) == {"delta", "unit"}
    shutil.rmtree(out / "private")
    study = read(out / "study.json")
    (out / "study.json").write_text(json.dumps(study | {"delta": 0.01}))
    with pytest.raises(ValueError, match=r"but its study\.json give 0\.01"):
        spent_by(account, out, 1e-3)
    (out / "study.json").write_text(json.dumps(study))
    without = spent_by(account, out, 1e-3)[1]
    assert (without.selection, without.delta) == (charge.selection, settings.delta)
    assert (without.mechanisms, without.id) == (charge.mechanisms, charge.id)
    (out / "config.json").unlink()  # as of an unfinished one
    unnamed = spent_by(account, out, 1e-3)[1]
    (out / "study.json").write_text(json.dumps(study | {"mechanism": None}))
    with pytest.raises(ValueError, match="of an older version of tanager, which did"):
        spent_by(account, out, 1e-3)
    # Nothing of it is derived from the recipe.
    less = study | {"recipe": {}, "examples": 10**9}
    (out / "study.json").write_text(json.dumps(less))
    other = spent_by(account, out, 1e-3)[1]
    assert other.mechanisms == charge.mechanisms
    assert other.id != unnamed.id  # another search at its place counts, too
    total = read(out / "result.json")["account"]
    assert (total["epsilon"], total["accountant"]) == (settings.epsilon, "rdp")
    assert "this one included, had spent ε = 3 at" in (out / "report.html").read_text()


def test_weights_that_the_same_data_made_are_named(tmp_path, monkeypatch):
    """Those of a private search, too: each of two searches spends all of it."""
    account, first = Account(tmp_path / "account"), tmp_path / "first"
    draws(monkeypatch, 1)
    search_privately(first, settings_of(account=str(account.path)))
    weights = str(first / "model-ema.safetensors")
    again = settings_of(account=str(account.path), weights=weights)
    second = tmp_path / "second"
    with pytest.warns(UserWarning, match="are of a run on the same data"):
        search_privately(second, again)
    assert len(account.read().charges) == 2
    changes = read(second / "config.json")["weights"]["changes"]
    assert any("not only the ε of its last run" in change for change in changes)


def test_an_error_of_a_run_does_not_tell_its_number(tmp_path, settings, monkeypatch):
    def full(prepared, **options):
        raise OSError(f"the disk of {prepared.recipe.out}/checkpoints is full")

    monkeypatch.setattr(private.runner, "run", full)
    with pytest.raises(OSError, match=r"private/runs/checkpoints is full$"):
        search_privately(tmp_path / "search", settings)


@pytest.mark.parametrize(
    "name", ["ledger.jsonl", "config.json", "result.json", "private/seed.json"]
)
def test_a_search_does_not_begin_in_the_folder_of_a_run(tmp_path, settings, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    first = name.partition("/")[0]
    with pytest.raises(ValueError, match=f"holds {first}, which is not of a search"):
        search_privately(tmp_path, settings)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / name]


@pytest.mark.parametrize("name", ["ledger.jsonl", "result.json"])
def test_a_run_beside_a_search_is_not_taken_for_its_best(tmp_path, settings, name):
    (tmp_path / "private").mkdir()
    for file in (name, "private/seed.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "study.json").write_text(json.dumps(settings.to_json()))
    refused = f"holds {name}, which is not of a search|{name}.* has no epsilon"
    with pytest.raises(ValueError, match=refused):
        search_privately(tmp_path, settings)


@pytest.mark.slow
def test_a_run_that_diverges_takes_part_and_has_nothing_right(
    tmp_path, settings, monkeypatch
):
    run, seen = private.runner.run, []

    def diverges(prepared, **options):
        seen.append(prepared)
        if len(seen) != 2:
            private.Path(prepared.recipe.out).mkdir(parents=True)
            raise FloatingPointError
        trained = run(prepared, **options)
        file = private.Path(prepared.recipe.out) / "result.json"
        right = json.loads(file.read_text()) | {"test_accuracy_ema": 1.0}
        file.write_text(json.dumps(right))
        return trained

    monkeypatch.setattr(private.runner, "run", diverges)
    draws(monkeypatch, 3)
    drawn = settings_of(vary="clip-norm=0.5..2")
    winner = search_privately(tmp_path / "search", drawn)
    assert len({each.recipe.clip_norm for each in seen}) == 3
    assert (tmp_path / "search/private/runs/0000/diverged").exists()
    assert winner.noisy_accuracy > 0.5  # scores 0, 1 and 0, noise 0.02
    assert len(seen) == 3
    draws(monkeypatch, 1)
    with pytest.raises(ValueError, match="the best run diverged, so nothing is releas"):
        search_privately(tmp_path / "alone", settings)


def test_no_run_at_all_releases_nothing_and_its_secret_serves_once(
    tmp_path, settings, monkeypatch
):
    draws(monkeypatch, 0)
    (tmp_path / "private").mkdir()  # killed as it began
    with pytest.raises(ValueError, match="drawn is 0, so nothing is released"):
        search_privately(tmp_path, settings)
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match="holds a search with other settings"):
        search_privately(tmp_path, dataclasses.replace(settings, epsilon=2.0))
    (tmp_path / "private/runs").rmdir()
    with pytest.raises(ValueError, match="lost private/runs, but its secret seed"):
        search_privately(tmp_path, settings)


def test_another_mechanism_than_the_accounted_one_is_refused(tmp_path, settings):
    less = dataclasses.replace(settings.recipe, noise_multiplier=2.0)
    planted = dataclasses.replace(settings, recipe=less)
    with pytest.raises(ValueError, match="where the search accounts for"):
        search_privately(tmp_path / "search", planted)


def test_a_number_of_runs_that_cannot_be_drawn_is_refused_first(tmp_path, settings):
    search = dataclasses.replace(settings.search, selection=Selection(2e6))
    with pytest.raises(ValueError, match=r"mean \(=2000000.0\) must be 1, or from"):
        search_privately(
            tmp_path / "search", dataclasses.replace(settings, search=search)
        )
    assert not (tmp_path / "search").exists()


@pytest.mark.statistical
def test_choices_are_drawn_evenly_and_differ_from_run_to_run():
    """χ² over 3000 draws of three values; false-alarm rate 1e-6."""
    space, seed = (
        Space.parse(["learning-rate=1,2,4", "clip-norm=0.5..2"]),
        Seed.from_int(0),
    )
    recipe = recipes.get("digits").recipe
    drawn = [
        space.draw(seed.generator("choices", number), recipe) for number in range(3000)
    ]
    rates = [each["learning_rate"] for each in drawn]
    assert stats.chisquare([rates.count(rate) for rate in (1, 2, 4)]).pvalue > 1e-6
    logs = [math.log(each["clip_norm"]) / math.log(2) for each in drawn]
    assert stats.kstest(logs, "uniform", (-1, 2)).pvalue > 1e-6


@pytest.mark.statistical
def test_scores_are_noised_by_what_the_search_says(settings):
    """KS test over 3000 draws; false-alarm rate 1e-6."""
    scale = settings.search.score_noise
    drawn = [
        noisy_count(0, settings.search, Seed.from_int(1), number)
        for number in range(3000)
    ]
    assert stats.kstest(np.divide(drawn, scale), "norm").pvalue > 1e-6
    assert scale > 0.5
    assert isinstance(settings.search, PrivateSearch)


def test_which_scores_are_possible_does_not_depend_on_the_count(settings):
    """In floats 3 % of the scores of 0 right were possible of no other count."""
    for count in (0, 1, 7):
        for number in range(500):
            score = noisy_count(count, settings.search, Seed.from_int(2), number)
            assert (score / _SCORE_GRID).is_integer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adjacency": "replace-one"}, "adjacency .*is not supported by private"),
        (
            {"adjacency": "add-or-remove-one", "declared_examples": 1400},
            "adjacency .*is not supported by private",
        ),
        ({"unit": "group", "groups": "person"}, r"unit \(='group'\) is not supported"),
        ({"vary": "steps=2,4"}, r"vary \(='steps'\) is not supported by private"),
        ({"class_weights": "balanced"}, "does not count the class counts"),
        ({"validation_examples": 0}, "validation_examples .*must be at least 1"),
        ({"seed": 1}, r"seed \(=1\) makes a search NOT private"),
        ({"epsilon": None, "noise_multiplier": 1.0}, "the noise multiplier is calib"),
    ],
)
def test_what_makes_no_private_search_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)
