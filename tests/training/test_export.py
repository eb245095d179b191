"""From a run to a model that can be handed on, and back."""

import dataclasses
import json
import re
import shutil
import stat

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import tanager
from tanager import data, models
from tanager.cli import main
from tanager.models import weights
from tanager.models.tensors import note_in, read_tensors
from tanager.training.result import cost


RUN = ["train", "digits", "--model", "linear", "--steps", "2"]
FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("of-alice") / "run"
    assert main([*RUN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def vit_run(first_vit_run, tmp_path):
    return shutil.copytree(first_vit_run, tmp_path / "vit-run")


@pytest.fixture(scope="module")
def first_vit_run(tmp_path_factory):
    """The files that a run of a vision transformer leaves."""
    options = {"classes": 2, "image_shape": (16, 32, 3), "key": jax.random.key(0)}
    template = eqx.filter_eval_shape(models.create, "vit-tiny-16", **options)
    drawn = np.random.default_rng(0)
    model = jax.tree.map(
        lambda leaf: drawn.standard_normal(leaf.shape, np.float32), template
    )
    shape = {"image_shape": [16, 32, 3]}
    config = {
        "model": "vit-tiny-16",
        "classes": ["cat", "dog"],
        "architecture": shape | {"name": "vit-tiny-16", "options": {}},
        "preprocessing": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    }
    return finished_run(tmp_path_factory.mktemp("vit") / "run", model, config)


def test_a_run_without_noise_is_exported_and_claims_nothing(tmp_path, capsys):
    run, to = str(tmp_path / "run"), str(tmp_path / "model")
    assert main([*RUN, "--non-private", "--out", run]) == 0
    capsys.readouterr()
    assert main(["export", run, "--to", to]) == 0
    assert capsys.readouterr().out.startswith(f"NOT PRIVATE: weights written to {to}\n")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["tanager"]["guarantee"]["epsilon"] is None
    assert config["tanager"]["guarantee"]["private"] is False


def finished_run(folder, model, config):
    folder.mkdir()
    mechanism = tanager.Mechanism(0.1, 2.0, 10)
    with tanager.Ledger(folder / "ledger.jsonl") as ledger:
        for step in range(mechanism.steps):
            ledger.charge(mechanism, step)
        config = config | {
            "mechanism": dataclasses.asdict(mechanism),
            "clip_norm": 1.0,
            "delta": 1e-5,
            "examples": 1000,
            "batch_size": 100,
        }
        result = {"private": True} | cost(ledger, mechanism, config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "result.json").write_text(json.dumps(result))
    weights.save(model, folder / "model.safetensors")
    weights.save(jax.tree.map(lambda x: x / 2, model), folder / "model-ema.safetensors")
    return folder


@pytest.mark.parametrize(
    ("which", "file", "key"),
    [
        ("average", "model-ema.safetensors", "test_accuracy_ema"),
        ("last", "model.safetensors", "test_accuracy"),
    ],
)
def test_an_exported_model_classifies_as_the_run_measured(
    run, tmp_path, which, file, key
):
    to = tanager.export(run, tmp_path / "out/model", weights=which)
    assert sorted(path.name for path in to.iterdir()) == FILES
    trained = models.load_pretrained(to)
    named = weights.named_tensors(trained.model)
    for name, array in read_tensors(run / file).items():
        np.testing.assert_array_equal(named[name], array)
    digits = data.load("digits")
    assert trained.classes == digits.classes

    examples = data.gather(digits.test, np.arange(len(digits.test)))
    logits = eqx.filter_jit(eqx.filter_vmap(trained))(jnp.asarray(examples["image"]))
    right = jnp.argmax(logits, axis=1) == examples["label"]
    result = json.loads((run / "result.json").read_text())
    assert float(jnp.mean(right, dtype=jnp.float32)) == pytest.approx(result[key])
    assert trained.config["tanager"]["guarantee"]["epsilon"] == result["epsilon"]
    charge = json.loads((run / "config.json").read_text())["charge"]
    assert trained.config["tanager"]["guarantee"]["charge"] == charge
    for path in (run / file, to / "model.safetensors"):
        assert note_in(path)["charge"] == charge


@pytest.fixture(scope="module")
def resized_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resized") / "run"
    more = ["--image-size", "12", "--seed", "987654321"]
    assert main([*RUN, *more, "--out", str(folder)]) == 0
    return folder


def test_an_exported_model_resizes_as_its_training_did(resized_run, tmp_path):
    to = tanager.export(resized_run, tmp_path / "model")
    assert "| resized | bicubic |" in (to / "README.md").read_text()
    trained = models.load_pretrained(to)
    digits = data.load("digits")
    examples = data.gather(digits.test, np.arange(len(digits.test)))
    logits = eqx.filter_jit(eqx.filter_vmap(trained))(jnp.asarray(examples["image"]))
    right = jnp.argmax(logits, axis=1) == examples["label"]
    result = json.loads((resized_run / "result.json").read_text())
    measured = result["test_accuracy_ema"]
    assert float(jnp.mean(right, dtype=jnp.float32)) == pytest.approx(measured)
    assert trained(np.zeros((99, 68, 1), np.uint8)).shape == (10,)
    with pytest.raises(ValueError, match=r"like \[channels, height, width\]"):
        trained(np.zeros((3, 10, 10), np.uint8))


def test_nothing_private_and_no_path_is_exported(run, tmp_path):
    to = tanager.export(run, tmp_path / "model")
    exported = b"\n".join(path.read_bytes() for path in sorted(to.iterdir()))
    secret = json.loads((run / "private/seed.json").read_text())["secret"]
    record = json.loads((run / "private/fingerprint.json").read_text())
    private = [secret.encode(), bytes.fromhex(secret), str(run).encode(), b"of-alice"]
    private += [value.encode() for value in record["prints"].values()]
    for line in (run / "private/metrics.jsonl").read_text().splitlines():
        numbers = json.loads(line)
        private.append(str(numbers["loss"]).encode())
    assert len(private) > 10
    for one in private:
        assert len(one) > 5
        assert one not in exported
    assert b'"seed"' not in exported and b"private/seed" not in exported


def test_a_fixed_seed_is_no_secret_but_not_exported_either(resized_run, tmp_path):
    to = tanager.export(resized_run, tmp_path / "model")
    for path in to.iterdir():
        assert b"987654321" not in path.read_bytes()
    charge = json.loads((resized_run / "config.json").read_text())["charge"]
    for path in (*to.iterdir(), *resized_run.glob("*.safetensors")):
        assert charge.encode() not in path.read_bytes()  # it could tell the seed
    card = (to / "README.md").read_text()
    assert "## NOT PRIVATE" in card
    assert "-differentially private" not in card


def test_timm_finds_its_names_and_what_to_build(vit_run, tmp_path):
    to = tanager.export(vit_run, tmp_path / "model", format="timm", licence="mit")
    stored = read_tensors(to / "model.safetensors")
    assert stored["patch_embed.proj.weight"].shape == (192, 3, 16, 16)
    assert stored["head.weight"].shape == (2, 192)
    with safe_open(to / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((to / "config.json").read_text())
    config.pop("tanager")
    assert config == {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 2,
        "label_names": ["cat", "dog"],
        "model_args": {"img_size": [16, 32], "in_chans": 3},
        "pretrained_cfg": {
            "input_size": [3, 16, 32],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
            "num_classes": 2,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
    }
    trained = models.load_pretrained(to)
    ema = weights.load(trained.model, vit_run / "model-ema.safetensors")
    assert eqx.tree_equal(trained.model, ema)


def test_a_model_of_your_own_code_is_exported_as_its_tensors(tmp_path):
    mine = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}
    run = finished_run(tmp_path / "run", mine, {})
    to = tanager.export(run, tmp_path / "model", weights="last")
    loaded = weights.load(mine, to / "model.safetensors")
    assert eqx.tree_equal(loaded, mine)
    with pytest.raises(ValueError, match="holds a model that is not one of tanager's"):
        models.load_pretrained(to)
    assert "its author's own code" in (to / "README.md").read_text()
    with pytest.raises(ValueError, match="needs a named architecture"):
        tanager.export(run, tmp_path / "timm", format="timm")


def test_the_command_says_what_it_wrote(vit_run, tmp_path, capsys):
    to = tmp_path / "model"
    assert main(["export", str(vit_run), "--to", str(to)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"weights written to {to}\n")
    for name in FILES:
        assert name in printed
    assert "licence: unknown" in printed
    words = ["--to", str(tmp_path / "2"), "--licence", "mit", "--json"]
    assert main(["export", str(vit_run), *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert sorted(record["files"]) == FILES
    assert record["licence"] == "mit"
    assert record["guarantee"]["epsilon"] == pytest.approx(0.7984675)
    assert record["guarantee"]["unit"] == "example"
    assert record["guarantee"]["class_counts_noise"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "ema"}, "weights (='ema') must be one of average, last"),
        ({"format": "tflite"}, "format (='tflite') must be one of tanager, timm, onnx"),
        ({"format": "timm"}, "format (='timm') has no linear: export it as tanager"),
        ({"licence": "a\nb: c"}, "licence (='a\\nb: c') must be an identifier"),
    ],
)
def test_what_cannot_be_exported_is_refused(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tanager.export(run, tmp_path / "model", **options)
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_none_or_not_finished_are_refused(vit_run, tmp_path):
    with pytest.raises(ValueError, match="is not the folder of a run: it has no conf"):
        tanager.export(tmp_path, tmp_path / "model")
    exported = tanager.export(vit_run, tmp_path / "exported")
    with pytest.raises(ValueError, match="is an exported model, not a run: give the"):
        tanager.export(exported, tmp_path / "model")
    (vit_run / "result.json").unlink()
    with pytest.raises(ValueError, match="is not finished: repeat the command"):
        tanager.export(vit_run, tmp_path / "model")


def test_weights_of_another_description_are_refused(vit_run, tmp_path):
    config = json.loads((vit_run / "config.json").read_text())
    config["classes"].append("bird")
    (vit_run / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"differs: head\.weight is float32\[192, 2\]"):
        tanager.export(vit_run, tmp_path / "model")


def test_a_folder_in_use_stays_as_it_is(vit_run, tmp_path):
    to = tmp_path / "model"
    to.mkdir()
    tanager.export(vit_run, to)  # empty is fine
    before = (to / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is in use: name a folder that is not there"):
        tanager.export(vit_run, to, weights="last")
    assert (to / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="is in use"):
        tanager.export(vit_run, to / "README.md")


def test_an_export_is_there_whole_or_not_at_all(vit_run, tmp_path, monkeypatch):
    from tanager.training import export

    def full(*words):
        raise OSError("disk full")

    monkeypatch.setattr(export, "write_text", full)
    with pytest.raises(OSError, match="disk full"):
        export.export(vit_run, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["vit-run"]
    monkeypatch.undo()
    to = export.export(vit_run, tmp_path / "model")
    assert stat.S_IMODE(to.stat().st_mode) & 0o055 == 0o055


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda ours: ours["preprocessing"].pop("mean"),
            "has no preprocessing.mean, which must be a list",
        ),
        (
            lambda ours: ours["model"].update(options={"x": 1}),
            "does not describe a model",
        ),
        (lambda ours: ours["model"].update(name="vit-tinny-16"), "did you mean vit-t"),
        (
            lambda ours: ours["classes"].append("bird"),
            "differs: head.weight is [192, 2]",
        ),
        (lambda ours: ours.pop("model"), "is not a config.json of a run or of `t"),
    ],
)
def test_a_damaged_description_is_refused(vit_run, tmp_path, change, message):
    to = tanager.export(vit_run, tmp_path / "model")
    config = json.loads((to / "config.json").read_text())
    change(config["tanager"])
    (to / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=re.escape(message)):
        models.load_pretrained(to)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="create the model and use load_weights"):
        models.load_pretrained(tmp_path)


def another_ledger(run):
    mechanism = tanager.Mechanism(0.01, 5.0, 4)
    (run / "ledger.jsonl").unlink()
    with tanager.Ledger(run / "ledger.jsonl") as ledger:
        for step in range(mechanism.steps):
            ledger.charge(mechanism, step)


def edit(name, **changes):
    def change(run):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(content | changes))

    return change


def less_risk(run):
    claimed = json.loads((run / "result.json").read_text())["risk"]
    edit("result.json", risk=claimed | {"advantage": 0.001})(run)


def less_epsilon(run):
    claimed = json.loads((run / "result.json").read_text())["epsilon"]
    edit("result.json", epsilon=0.99 * claimed)(run)


def test_a_run_of_a_version_without_risks_is_exported(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    edit("result.json", risk=None)(copy)
    to = tanager.export(copy, tmp_path / "model")
    assert "members" not in (to / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (less_risk, "claims advantage = 0.001 in result.json"),
        (another_ledger, "it belongs to another run"),
        (lambda run: (run / "ledger.jsonl").unlink(), "has no ledger.jsonl"),
        (less_epsilon, "claims epsilon = "),
        (edit("result.json", delta=1e-9), "claims delta = 1e-09 in result.json"),
        (edit("result.json", private=False), "claims private = False"),
        (edit("config.json", clip_norm=1.001), "claims clip_norm = 1.0 in result.json"),
    ],
)
def test_a_result_that_differs_from_the_run_s_other_files_is_refused(
    run, tmp_path, change, message
):
    copy = shutil.copytree(run, tmp_path / "run")
    change(copy)
    with pytest.raises(ValueError, match=re.escape(message)):
        tanager.export(copy, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_timm_is_refused_where_it_would_see_more_than_the_middle(vit_run, tmp_path):
    file = vit_run / "config.json"
    config = json.loads(file.read_text())
    seen = config["preprocessing"] | {"read_shape": [20, 40, 3], "view_by": "crop"}
    for view, refused in (([16, 32], True), ([20, 40], False)):
        config["preprocessing"] = seen | {"view": view}
        file.write_text(json.dumps(config))
        if not refused:
            tanager.export(vit_run, tmp_path / "whole", format="timm")
            continue
        with pytest.raises(ValueError, match="has no crop_size, which keeps the midd"):
            tanager.export(vit_run, tmp_path / "cut", format="timm")
        tanager.export(vit_run, tmp_path / "own")
