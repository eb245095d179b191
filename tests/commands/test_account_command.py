"""`tanager account`: what the runs on some data spent, by command as by hand."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tanager import Mechanism, cli, recipes
from tanager._files import write_json
from tanager.commands import spent
from tanager.commands.accounts import limit_warning, sentence, total_of
from tanager.commands.spent import recorded, spent_by
from tanager.privacy import accountant
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.shown import format_epsilon
from tanager.recipes.accounts import default_path, path_of


TRAIN = "train digits --model linear --strategy bk --steps 4 --evaluate-every 4 "
TRAIN += "--physical-batch-size 512"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said(capsys):
    """Run a command, and return its exit code, what it printed and its errors."""

    def run(words, *more):
        code = cli.main([*words.split(), *more])
        return code, *capsys.readouterr()

    return run


def test_runs_by_command_spend_what_they_do_by_hand(said, tmp_path):
    code, _, errors = said("account")
    assert code == 2 and "does not exist: no run was charged to it: name" in errors
    (tmp_path / "an album").mkdir()
    code, _, errors = said("account --data", "an album")
    assert (
        code == 2 and "no run was charged to it yet: `tanager account limit" in errors
    )
    assert "--data 'an album' --epsilon E --delta D` sets a limit" in errors
    noises, printed = (2.0, 3.0), ""
    for noise in noises:
        code, printed, _ = said(
            f"{TRAIN} --noise-multiplier {noise} --out runs/{noise}"
        )
        assert code == 0
    by_hand = [Mechanism(512 / 1437, noise, 4) for noise in noises]
    total = accountant.composed_epsilon(by_hand, 1e-4)
    sentence = f"all runs on these data together ε = {format_epsilon(total)} at δ = "
    assert f"digits.account.jsonl: {sentence}0.0001 (zero-out, PLD)" in printed
    _, printed, _ = said("account")
    assert f"{512 / 1437:.6g}" in printed  # q and σ in digits that can be typed again
    code, printed, _ = said("account --json")
    found = json.loads(printed)
    assert (code, found["epsilon"], found["delta"]) == (0, total, 1e-4)
    for charge, one in zip(found["charges"], by_hand, strict=True):
        assert charge["epsilon"] == accountant.epsilon(one, 1e-4)
        assert charge["name"] == str(tmp_path / "runs" / str(one.noise_multiplier))
    code, printed, _ = said("account limit --epsilon 4 --delta 1e-4")
    assert code == 0 and "limit ε = 4 at δ = 0.0001: " in printed
    # Refused, and nothing is made.
    code, _, errors = said(f"{TRAIN} --noise-multiplier 1 --out runs/more")
    assert code == 2 and "has a limit of ε = 4 at δ = 0.0001: " in errors
    assert "what fits is ε = " in errors
    assert not (tmp_path / "runs/more").exists()
    # Deleted runs stay charged; a finished one that is run again counts once.
    shutil.rmtree(tmp_path / "runs/2.0")
    said(f"{TRAIN} --noise-multiplier 3.0 --out runs/3.0")
    found = json.loads(said("account --json")[1])
    assert (found["epsilon"], len(found["charges"])) == (total, 2)
    remains = found["limit"]["remaining"]
    assert remains == pytest.approx(4 - total) and remains < found["limit"]["fits"] < 4
    lines = said("account", found["account"])[1].splitlines()
    assert [line.split()[2] for line in lines[1:3]] == ["run"] * 2
    assert f"together ε = {format_epsilon(total)} at δ = 0.0001" in lines[3]


def test_ledgers_are_added_once(said, made, tmp_path):
    shutil.copytree(made, tmp_path / "runs/1")
    said(f"{TRAIN} --noise-multiplier 2 --account none --out runs/2")
    assert not default_path("digits", None).exists()
    shutil.copy(tmp_path / "runs/2/ledger.jsonl", tmp_path / "alone.jsonl")
    words = "account add runs/1 alone.jsonl --account mine --delta 1e-3 --json"
    # A ledger alone may be of persons: then ε for each image would be too low.
    code, _, errors = said(words)
    assert code == 2 and "that says its unit of privacy: give the run's" in errors
    assert not (tmp_path / "mine").exists()
    code, _, errors = said(f"{words} --unit image")
    assert code == 2 and "--unit (='image') must be" in errors
    words += " --unit example"
    for _ in range(2):
        code, printed, _ = said(words)
        found = json.loads(printed)
        assert code == 0
        assert [each["delta"] for each in found["charges"]] == [1e-4, 1e-3]
        two = [Mechanism(512 / 1437, 2.0, 8)]
        assert found["epsilon"] == accountant.composed_epsilon(two, 1e-4)
    # The run that was added goes on in the account without another charge.
    again = f"{TRAIN} --noise-multiplier 2 --account mine --out runs/1"
    assert said(again)[0] == 0
    assert len(Account(tmp_path / "mine").read().charges) == 2
    # So does one whose secret is gone, as that of a search's trials is.
    shutil.rmtree(tmp_path / "runs/1/private")
    assert len(json.loads(said(words)[1])["charges"]) == 2
    before = (tmp_path / "mine").read_bytes()
    (tmp_path / "study").mkdir()
    write_json(tmp_path / "study/study.json", {"recipe": {"batch_size": 4}})
    edited(tmp_path / "runs/2", tmp_path / "persons", unit="person")
    for words, message in (
        ("runs/1 --delta 5", "--delta (=5.0) must be strictly between 0 and 1"),
        ("runs/1 --delta 1e-3", "--delta (=0.001) does not apply to runs whose con"),
        ("runs/1 --unit example", "--unit (='example') does not apply to runs"),
        ("runs", "runs (='runs') has no ledger.jsonl, so what it spent is unknown"),
        ("runs/2 none", "runs (='none') has no ledger.jsonl"),
        ("study", "is a search of simulations, which are charged one by one"),
        ("persons", "spends, and this run's unit of privacy is one person"),
    ):
        code, _, errors = said(f"account add {words} --account mine")
        assert code == 2 and message in errors
    assert (tmp_path / "mine").read_bytes() == before


def edited(run, out, **changes):
    """Copy a run, as if it had been another, without its secret and its result."""
    shutil.copytree(run, out)
    shutil.rmtree(out / "private")
    (out / "result.json").unlink()
    config = json.loads((out / "config.json").read_text()) | changes
    write_json(out / "config.json", config)
    return out


def check_added(tmp_path):
    """What is not on record is taken to be as bad as it can be."""
    whole = (Mechanism(512 / 1437, 2.0, 4),)
    (known,) = (dataclasses.replace(one, noise_multiplier=0.0) for one in whole)
    run, account = tmp_path / "run", Account(tmp_path / "new")
    _, first = spent_by(account, run, 1e-3)
    assert (first.mechanisms, first.delta) == (whole, 1e-4)
    cut = edited(run, tmp_path / "cut")
    lines = (cut / "ledger.jsonl").read_text().splitlines(keepends=True)
    (cut / "ledger.jsonl").write_text("".join(lines[:2]))
    _, unfinished = spent_by(account, cut, 1e-3)
    assert (unfinished.mechanisms, unfinished.id) == (whole, first.id)
    recipe = {"recipe": {"seed": 3}}
    for number, changes in enumerate([{"private": False}, recipe]):
        fixed = edited(run, tmp_path / f"fixed{number}", **changes)
        assert spent_by(account, fixed, 1e-3)[1].mechanisms == (known,)
    # Another ledger that was put beside it is another run.
    shutil.copy(run / "ledger.jsonl", run / "other.jsonl")
    own, other = spent_by(account, run / "other.jsonl", 1e-3, "person")
    assert other.id != first.id and (other.delta, own.unit) == (1e-3, "person")
    old = edited(run, tmp_path / "old", unit=None)
    assert recorded(run) == {"delta", "unit"} and recorded(old) == {"delta"}
    assert recorded(run / "other.jsonl") == set()
    persons = edited(run, tmp_path / "persons", unit="person")
    assert spent_by(account, persons, 1e-3)[0].unit == "person"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run without an account."""
    out = tmp_path_factory.mktemp("made") / "run"
    words = f"{TRAIN} --noise-multiplier 2 --account none --out"
    assert cli.main([*words.split(), str(out)]) == 0
    return out


def test_a_run_is_added_in_full(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    check_added(tmp_path)


def test_a_finished_run_is_added_with_what_its_result_claims(made, tmp_path):
    run, account = shutil.copytree(made, tmp_path / "run"), Account(tmp_path / "new")
    config = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", config | {"delta": 0.01})
    for each in (run, run / "ledger.jsonl"):
        with pytest.raises(ValueError, match=r"claims epsilon = .*, but its config"):
            spent_by(account, each, 1e-3)


@pytest.mark.parametrize("name", ["charge", "private", "mechanism", "recipe", "unit"])
def test_planted_a_part_of_the_record_is_not_read(made, tmp_path, monkeypatch, name):
    shutil.copytree(made, tmp_path / "run")
    if_there = spent._if_there

    def without(path, shape):
        return {**if_there(path, shape), name: None}

    monkeypatch.setattr(spent, "_if_there", without)
    with pytest.raises(AssertionError if name != "unit" else ValueError):
        check_added(tmp_path)


def test_an_account_without_data_is_named_by_its_file_alone(said, tmp_path):
    for words, message in (
        ("--data photoz", "data (='photoz') does not exist: name the folder of"),
        ("--dataset digit", "dataset (='digit') is not brought by tanager"),
        ("--data a --account b", "account (='b') names the account, so --data must"),
        ("--data a --dataset b", "data (='a') names the account, so --dataset must be"),
    ):
        for command in ("limit --epsilon 4 --delta 1e-5", "add run"):
            code, _, errors = said(f"account {command} {words}")
            assert code == 2 and message in errors
    for command in ("", "limit --epsilon 4 --delta 1e-5", "add run", "accept"):
        code, _, errors = said(f"account {command} --account none")
        assert code == 2 and "--account (='none') means no account: give" in errors
    code, _, errors = said("account add --account new")
    assert code == 2 and "runs (=None) must be given: folders of runs" in errors
    assert not [*tmp_path.iterdir()]
    code, printed, _ = said("account limit --epsilon 4 --delta 1e-5 --account new")
    assert code == 0 and "limit ε = 4 at δ = 1e-05" in printed
    code, _, errors = said("account new --delta 0")
    assert code == 2 and "delta (=0.0) must be strictly between 0 and 1" in errors
    code, _, errors = said("account new --data photos")
    assert code == 2 and "names the account, so --data must be left out" in errors
    # A limit says nothing of the unit, and commands read an account of any.
    account = Account(tmp_path / "new", unit="person")
    account.charge(Charge("run", "", "", 1e-5, (Mechanism(1.0, 9.0, 5),)))
    words = "account limit --epsilon 5 --delta 1e-5 --account new"
    assert ", for each person\n" in said(words)[1]
    recipe = dataclasses.replace(recipes.get("digits").recipe, account="new")
    total = total_of(recipe, 1e-5)
    assert total == account.read().total(1e-5).to_json()
    assert sentence(recipe, total).startswith("charged to new: all runs on these data")
    account.path.unlink()
    assert total_of(recipe, 1e-5) is None
    assert sentence(recipe, None).startswith("new has no charges: it was deleted since")


def test_names_are_on_one_line_and_can_be_pasted(said, tmp_path):
    name = str(tmp_path / "an\nalbum")
    recipe = dataclasses.replace(recipes.get("digits").recipe, account=name)
    clear = name.replace("\n", " ")
    total = {"epsilon": 1, "delta": 1e-5, "adjacency": "zero-out", "accountant": "pld"}
    assert sentence(recipe, total).startswith(f"charged to {clear}: all runs")
    said_of_none = sentence(recipe, None)
    assert said_of_none.startswith(f"{clear} has no")
    assert said_of_none.endswith(f"--account {shlex.quote(name)}\n")
    charge = Charge("run", "one", "1", 1e-5, (Mechanism(1.0, 3.0, 4),))
    Account(Path(name), data="one").charge(charge)
    assert said("account", name)[1].endswith(f"account: {clear}\n")
    spaced = Account(tmp_path / "an album", data="other")
    shutil.copy(name, spaced.path)
    with pytest.raises(ValueError, match=f"accept --account '{spaced.path}'` and"):
        spaced.require_room(charge)


def test_two_accounts_of_the_same_data_are_refused(tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    photos.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        elsewhere = default_path("folder", "photos")
        assert default_path("folder", "more/photos") != elsewhere
        features = recipes.get("features").recipe
        made = dataclasses.replace(features, features_from="photos")
        assert path_of(made) == elsewhere
    Account(elsewhere).set_limit(1.0, 1e-5)
    assert default_path("folder", "photos") == elsewhere
    beside = tmp_path / "photos.account.jsonl"
    Account(beside).set_limit(1.0, 1e-5)
    with pytest.raises(ValueError, match="has two accounts") as refused:
        default_path("folder", "photos")
    assert str(beside) in str(refused.value) and str(elsewhere) in str(refused.value)
    elsewhere.unlink()
    (tmp_path / "link").symlink_to(photos)
    for same in ("photos", "photos/train_features.npy", "link"):
        assert default_path("folder", same) == beside


def test_a_part_of_data_that_have_an_account_begins_no_other(tmp_path, monkeypatch):
    """Else a run on photos/train forgets what was spent on photos, or on a file in it.

    So does a limit.
    """
    train = tmp_path / "photos" / "train"
    train.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        elsewhere = default_path("folder", "photos")
    for around in (tmp_path / "photos.account.jsonl", elsewhere):
        Account(around).set_limit(1.0, 1e-5)
        for part in ("photos/train", "photos/train/more.parquet"):
            with pytest.raises(ValueError, match=f"no account yet, and {around} is"):
                default_path("folder", part)
        around.unlink()
    own = default_path("folder", "photos/train")
    Account(own).set_limit(1.0, 1e-5)
    with pytest.raises(ValueError, match=f"no account yet, and {own} is of data"):
        default_path("folder", "photos")
    assert default_path("folder", "photos/train") == own
    (tmp_path / "others").mkdir()
    others = tmp_path / "others" / "train.account.jsonl"
    assert default_path("folder", "others/train") == others


FOLDER = "train folder --data photos --image-size 8 --model linear --strategy bk "
FOLDER += "--steps 2 --noise-multiplier 9 --batch-size 4 --delta 0.001"


@pytest.mark.usefixtures("stops_when_charged")
def test_changed_data_are_refused_until_they_are_accepted(said, tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    beside = tmp_path / "photos.account.jsonl"
    # The same data, whatever is taken of them and however they are read.
    for more in ("", "--stream True --image-size 9", "--train-examples 10"):
        assert said(f"{FOLDER} {more} --out runs/{more.split()[:1]}")[0] == 130
    assert beside.stat().st_mode & 0o777 == 0o600
    assert len(Account(beside).read().charges) == 3
    photos = tmp_path / "photos"
    shutil.copy(photos / "a/0.png", photos / "a/more.png")
    before = beside.read_bytes()
    code, printed, errors = said(f"{FOLDER} --out runs/changed")
    assert "run:" not in printed
    assert code == 2 and "is of other data, or the data were changed since" in errors
    assert "read with another --groups" in errors and "give --groups as be" in errors
    assert f"tanager account accept --account {beside}" in errors
    assert not (tmp_path / "runs/changed").exists() and beside.read_bytes() == before
    assert said(f"account accept --data {photos}")[0] == 0
    assert said(f"{FOLDER} --out runs/changed")[0] == 130
    assert len(Account(beside).read().charges) == 4
    # Renamed data have the account that they had, or one that a person names.
    photos.rename(tmp_path / "skin")
    renamed, before = FOLDER.replace("photos", "skin"), beside.read_bytes()
    code, _, errors = said(f"{renamed} --out runs/renamed")
    assert code == 2 and f"these data were charged to {beside}: if they wer" in errors
    assert not (tmp_path / "skin.account.jsonl").exists()
    assert said(f"{renamed} --out runs/own --account own")[0] == 130
    assert beside.read_bytes() == before
    beside.rename(tmp_path / "skin.account.jsonl")
    assert said(f"{renamed} --out runs/renamed")[0] == 130
    assert len(Account(tmp_path / "skin.account.jsonl").read().charges) == 5
    (tmp_path / "skin.account.jsonl").rename(beside)
    (tmp_path / "skin").rename(photos)
    # Where the data's folder cannot be written to, it is among this user's files.
    beside.unlink()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    elsewhere = default_path("folder", "photos")
    assert elsewhere.parent.name == "accounts" and elsewhere.name.startswith("photos-")


def test_simulations_are_charged_and_refused_before_their_study(said, tmp_path):
    search = "search digits --model linear --strategy bk --steps 2 --trials 1 "
    search += "--simulation-batch-sizes 16 --repeats 1 --vary learning-rate=0.5,1 "
    search += "--noise-multiplier 4 --sampler random --pruner none --account mine"
    Account(tmp_path / "mine").set_limit(2.0, 1e-4)
    code, _, errors = said(f"{search} --out study")
    assert code == 2 and "and this search would make it " in errors
    assert not (tmp_path / "study").exists()
    Account(tmp_path / "mine").set_limit(1e6, 1e-4)
    code, printed, _ = said(f"{search} --out study")
    assert code == 0 and "charged to mine: all runs on these data together" in printed
    charges = Account(tmp_path / "mine").read().charges.values()
    assert [charge.what for charge in charges] == ["search"] * 2
    # A batch of 16 from those that are not held out, with as much less noise.
    [one] = {charge.mechanisms for charge in charges}
    assert one == (Mechanism(16 / (1437 - 143), 4.0 * 16 / 512, 2),)


@pytest.mark.usefixtures("no_audit_pictures")
def test_an_audit_says_what_it_charged(said, tmp_path):
    words = "audit digits --model linear --strategy bk --steps 4 --noise-multiplier 2 "
    words += (
        "--canaries 20 --audited-examples 32 --physical-batch-size 64 --batch-size "
    )
    words += "150 --audited-steps 2 --account mine"
    code, printed, _ = said(f"{words} --out audit")
    assert code == 0 and "charged to mine: all runs on these data together" in printed
    [charge] = Account(tmp_path / "mine").read().charges.values()
    assert (charge.what, charge.mechanisms[0].steps) == ("audit", 2)
    Account(tmp_path / "mine").set_limit(0.01, 1e-4)
    code, _, errors = said(f"{words} --out more")
    assert code == 2 and "has a limit of ε = 0.01" in errors
    assert not (tmp_path / "more").exists()


def test_a_pipe_is_given_long_names_and_their_epsilon(said, tmp_path):
    name = f"/data/{'a' * 200}/run"
    charge = Charge("run", name, "1", 1e-5, (Mechanism(1.0, 3.0, 4),))
    Account(tmp_path / "new").charge(charge)
    code, printed, _ = said("account new")
    epsilon = format_epsilon(accountant.epsilon(charge.mechanisms[0], 1e-5))
    assert (code, printed.splitlines()[1].split()[-3:]) == (0, ["4", epsilon, name])


def test_a_limit_at_a_large_delta_is_warned_of(said, tmp_path):
    """At δ = 0.5 the ε of any run looks small, and a limit refuses next to nothing."""
    Account(tmp_path / "mine").set_limit(1.0, 0.5)
    digits = recipes.RECIPES["digits"].recipe
    run = dataclasses.replace(digits, account="mine")
    found = limit_warning(run, 1e-4, 1437)
    assert found and "mine allows more than it seems: its delta (0.5)" in found
    assert limit_warning(run, 0.5, 1437) is None
    charge = Charge("run", "one", "1", 1e-4, (Mechanism(1.0, 3.0, 4),))
    Account(tmp_path / "mine").charge(charge)
    _, _, errors = said("account mine")
    assert "delta (0.5) is above that of a charge (0.0001)" in errors
