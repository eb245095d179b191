"""Damaged files of a study's folder: used, or refused by one message with a name."""

import json

import mutations
from switch import FULL
from tanager.commands import studies
from tanager.search import jobs
from tanager.search.jobs import Outcome
from tanager.search.settings import agreed
from tanager.search.study import TrialResult, _read_trial, _trial_result


def fuzz(file, good, read, *arguments, cases=400 if FULL else 200):
    fuzzed = mutations.Fuzz(file.name)
    for text in mutations.of_json(good, cases):
        file.write_bytes(text)
        fuzzed(read, *arguments)
    fuzzed.end()
    file.write_text(json.dumps(good))
    return read(*arguments)


def test_what_is_searched(tmp_path, settings):
    folder = tmp_path / "study"
    agreed(folder, settings)
    file = folder / "study.json"
    found = fuzz(file, json.loads(file.read_text()), agreed, folder, None)
    assert found == settings


def test_trials(tmp_path):
    done = TrialResult(0, {"learning_rate": 1.0}, "complete", 0.5, 12, 2.0, 1e6)
    assert fuzz(tmp_path / "done.json", done._asdict(), _trial_result, tmp_path) == done
    trial = {"number": 0, "values": {"learning_rate": 1.0}}
    trial |= {"accuracies": {"4": 0.5}, "rungs": {"completed_rung_0": 0.5}}
    trial |= {"seconds": 1.5, "pruned": False}
    assert fuzz(tmp_path / "trial.json", trial, _read_trial, tmp_path) == trial


def test_outcomes(tmp_path):
    outcome = Outcome(0.5, 1e6, 2.0)
    file = tmp_path / "outcome.json"
    assert fuzz(file, outcome._asdict(), jobs.outcome, tmp_path) == outcome


def test_studies_that_are_trained_from(tmp_path, settings):
    trial = {"values": {}, "accuracy": 0.5, "batch_size": 16}
    result = {
        "recipe": "digits",
        "target": {"epsilon": 2.336, "delta": 1e-5, "steps": 400},
        "best": {**trial, "trial": 1, "recipe": settings.target.recipe.to_json()},
        "prediction": None,
        "law": None,
        "bands": [],
        "trials": [{**trial, "number": 0, "state": "pruned", "steps": 3}],
        "cost": {"trials_share": 0.03125, "winner_share": 0.5, "seconds": 120.0},
        "privacy": {"simulations_epsilon": {"8": None}, "held_out_examples": 2000},
    }
    fuzzed = mutations.Fuzz(str(tmp_path))
    for text in mutations.of_json(result, 400 if FULL else 200):
        (tmp_path / "result.json").write_bytes(text)
        fuzzed(studies._read, tmp_path)
    fuzzed.end()
