"""From pretraining without privacy to each way of private fine-tuning."""

import dataclasses
import json
import re

import equinox as eqx
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tanager import models, recipes
from tanager.cli import main
from tanager.privacy.account import Account
from tanager.privacy.charges import Charge
from tanager.privacy.mechanism import Mechanism
from tanager.recipes import own_weights, runner, tasks
from tanager.recipes.recipe import Recipe
from tanager.search.settings import check_choices
from tanager.search.space import Space
from tanager.seed import Seed


COMMON = ["--steps", "2", "--batch-size", "200", "--evaluate-every", "2", "--seed", "1"]
HEAD = {"head.weight", "head.bias"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The digits, trained on in the open."""
    out = tmp_path_factory.mktemp("open") / "run"
    assert main(openly(out)) == 0
    return out


def openly(out):
    words = ["train", "digits", "--non-private", "--out", str(out), *COMMON]
    return [*words, "--learning-rate-schedule", "cosine", "--weight-decay", "1e-4"]


def fine_tune(pretrained, out, *words):
    weights = str(pretrained / "model.safetensors")
    start = ["train", "digits", "--weights", weights, "--out", str(out), *COMMON]
    return main([*start, "--noise-multiplier", "2", *words])


def test_a_run_without_privacy_says_so_wherever_it_is_seen(pretrained, capsys):
    result = json.loads((pretrained / "result.json").read_text())
    assert result["private"] is False
    assert result["clip_norm"] is None
    assert "NOT PRIVATE" in (pretrained / "report.html").read_text()
    assert main(openly(pretrained)) == 0
    shown = capsys.readouterr()
    assert "this run is NOT PRIVATE" in shown.err
    assert "NOT PRIVATE: no clipping, no noise" in shown.out


@pytest.mark.usefixtures("stops_when_charged")
def test_weights_that_the_same_data_made_are_told(pretrained, tmp_path, capsys):
    """The ε of the second run is not what the model spent."""
    words = ["--fine-tune", "biases-and-norms"]
    for account in ("none", str(tmp_path / "account")):
        capsys.readouterr()
        out = tmp_path / f"by {account[:4]}"
        assert fine_tune(pretrained, out, *words, "--account", account) == 130
        assert "are of a run on the same data" not in capsys.readouterr().err
    assert main([*openly(pretrained), "--account", str(tmp_path / "account")]) == 130
    out = tmp_path / "own"
    assert fine_tune(pretrained, out, *words, "--account", account) == 130
    assert "are of a run on the same data" in capsys.readouterr().err
    changes = json.loads((out / "config.json").read_text())["weights"]["changes"]
    assert any("not only the ε of its last run" in change for change in changes)
    # What an account knows may change before a resume.
    assert fine_tune(pretrained, out, *words, "--account", "none") == 130


NOTE = {"epsilon": 3.2, "delta": 1e-5, "private": True, "charge": "of the first"}


def test_weights_out_of_their_folder_tell_what_they_spent(tmp_path):
    """A file is copied without what was beside it; an export of timm has that alone."""
    account = Account(tmp_path / "account")
    files = {}
    for name in ("file", "export", "other"):
        files[name] = file = tmp_path / name / "model.safetensors"
        file.parent.mkdir()
        said = {"tanager": json.dumps(NOTE)} if name == "file" else {"format": "pt"}
        save_file({"a": np.zeros(1, np.float32)}, file, said)
    beside = {"tanager": {"guarantee": NOTE}}
    files["export"].with_name("config.json").write_text(json.dumps(beside))
    assert own_weights.remarks(str(files.pop("other")), account) == []
    for file in files.values():
        with pytest.warns(UserWarning, match="with ε = 3.2 at δ = 1e-05, which adds"):
            assert own_weights.remarks(str(file), account)
    account.charge(Charge("run", "", "of the first", 1e-5, (Mechanism(0.1, 2.0, 5),)))
    for file in files.values():
        with pytest.warns(UserWarning, match="are of a run on the same data"):
            own_weights.remarks(str(file), account)


@pytest.mark.parametrize("account", [False, True])
def test_weights_that_no_guarantee_covers_are_told(tmp_path, account):
    account = Account(tmp_path / "account") if account else None
    open_run = NOTE | {"private": False, "charge": None, "epsilon": None}
    file = tmp_path / "model.safetensors"
    said = {"tanager": json.dumps(open_run)}
    save_file({"a": np.zeros(1, np.float32)}, file, said)
    with pytest.warns(UserWarning, match="was not private, so no ε covers the images"):
        assert own_weights.remarks(str(file), account)


def moved(before, after):
    assert {name: x.shape for name, x in after.items()} == {
        name: x.shape for name, x in before.items()
    }
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_what_is_not_trained_stays_as_it_was_pretrained(pretrained, tmp_path):
    assert fine_tune(pretrained, tmp_path / "run", "--fine-tune", "film") == 0
    before = load_file(pretrained / "model.safetensors")
    after = load_file(tmp_path / "run/model.safetensors")
    norms = {name for name in before if ".norm." in name}
    assert moved(before, after) == HEAD | norms
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["parameters"] == sum(before[name].size for name in HEAD | norms)
    assert config["weights"]["head"] == "fresh"


def test_features_are_computed_once_and_shared(pretrained, tmp_path):
    folder = tmp_path / "features"
    words = ["--fine-tune", "last-layer", "--features", str(folder)]
    assert fine_tune(pretrained, tmp_path / "one", *words) == 0
    first = (folder / "training/features.npy").stat()
    assert fine_tune(pretrained, tmp_path / "two", *words, "--learning-rate", "1") == 0
    assert (folder / "training/features.npy").stat().st_mtime_ns == first.st_mtime_ns
    before, one, two = (
        load_file(out / "model.safetensors")
        for out in (pretrained, tmp_path / "one", tmp_path / "two")
    )
    assert moved(before, one) == moved(one, two) == HEAD


def task_of(folder, **fields):
    """What is trained of the digits' recipe, from weights of its model in a folder."""
    recipe = dataclasses.replace(recipes.get("digits").recipe, **fields)
    dataset = runner.load(recipe)
    model = models.create(
        recipe.model, classes=10, image_shape=(8, 8, 1), key=jax.random.key(0)
    )
    models.save_weights(model, folder / "weights.safetensors")
    recipe = dataclasses.replace(recipe, weights=str(folder / "weights.safetensors"))
    task = tasks.make(recipe, dataset, Seed.from_int(0), folder, False)
    return model, task.problem


def test_the_head_can_be_kept_or_start_at_nothing(tmp_path):
    for head, scale in (("load", 1), ("zero", 0)):
        model, problem = task_of(tmp_path, head=head)
        np.testing.assert_array_equal(
            problem.params.head.weight, scale * model.head.weight
        )


def test_weights_that_do_not_say_their_preprocessing_are_warned_of(tmp_path):
    task_of(tmp_path)
    weights = str(tmp_path / "weights.safetensors")
    recipe = dataclasses.replace(recipes.get("digits").recipe, weights=weights)
    dataset = runner.load(recipe)
    with pytest.warns(UserWarning, match="no description of their preprocessing"):
        runner.prepare("digits", recipe, dataset=dataset)
    space = Space.parse(["learning-rate=0.25,0.5"])
    with pytest.warns(UserWarning, match="no description") as warned:
        check_choices(space, recipe, 4, dataset)
    assert len(warned) == 1
    known = dataclasses.replace(recipe, preprocessing="data")
    runner.prepare("digits", known, dataset=dataset)
    for each, said in ((recipe, True), (known, False)):
        origin = tasks.make(each, dataset, Seed.from_int(0), tmp_path, False).origin
        assert origin is not None
        assert any("is unknown" in change for change in origin["changes"]) is said


def test_low_rank_products_become_part_of_the_convolutions(tmp_path):
    _, problem = task_of(tmp_path, model="wrn-10-1", fine_tune="lora", lora_rank=2)
    trained, fixed = eqx.partition(problem.params, problem.trainable)
    trained = jax.tree.map(lambda leaf: leaf + 0.1, trained)
    merged = eqx.filter_jit(problem.finish)(eqx.combine(trained, fixed))
    models.save_weights(merged, tmp_path / "after.safetensors")
    before = load_file(tmp_path / "weights.safetensors")
    after = load_file(tmp_path / "after.safetensors")
    convolved = {
        name
        for name in before
        if name.startswith("blocks.") and name.endswith((".weight", ".gain"))
    }
    assert moved(before, after) == convolved | HEAD


def test_low_rank_products_need_gains_to_become_part_of(pretrained, tmp_path, capsys):
    assert fine_tune(pretrained, tmp_path / "run", "--fine-tune", "lora") == 2
    assert "needs a gain on every standardised convolution" in capsys.readouterr().err
    assert not (tmp_path / "run/ledger.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"non_private": True, "epsilon": None, "steps": None},
            "steps (=None) must be",
        ),
        ({"weight_decay": -1.0}, "weight_decay (=-1.0) must be finite"),
    ],
)
def test_impossible_recipes_are_refused(changes, message):
    fields = recipes.get("digits").recipe.to_json() | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe(**fields)


def test_a_typed_budget_is_not_dropped_silently(tmp_path, capsys):
    words = ["train", "digits", "--non-private", "--epsilon", "3"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    assert "epsilon (=3.0) must be left out" in capsys.readouterr().err


def test_parts_of_a_random_model_are_not_fine_tuned(tmp_path, capsys):
    words = ["train", "digits", "--fine-tune", "last-layer"]
    assert main([*words, "--out", str(tmp_path / "r")]) == 2
    told = "--fine-tune (='last-layer') must be all without pretrained weights"
    assert told in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
