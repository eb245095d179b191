"""`tanager search` on the digits, from end to end, stopped on the way."""

import contextlib
import dataclasses
import io
import json
import re

import pytest

from tanager import data, recipes
from tanager.cli import main
from tanager.commands import experiments, search
from tanager.commands.experiments import Ablation, target_of
from tanager.privacy.account import Account
from tanager.report import search_page
from tanager.search import jobs
from tanager.training.norms import Norms


FEW = "--model linear --noise-multiplier 4 --strategy bk --evaluate-every 4 --seed 1"
VARY = "--simulation-batch-sizes 16 64 --vary learning-rate=0.25,0.5,1"
WORDS = f"search digits {FEW} --steps 12 --trials 2 --repeats 1 --json {VARY}".split()
SHORT = f"{FEW} --steps 4 --simulation-batch-size 16".split()

NOT_DRAWN = "matplotlib.figure.Figure.savefig", lambda *_, **__: None


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A search that was stopped when a trial had ended; workers die in test_study."""
    held_out, load = [], data.load

    def stop(study, done, shown):
        raise KeyboardInterrupt

    def noted(*arguments, validation_examples=0, **rest):
        held_out.append(validation_examples)
        return load(*arguments, validation_examples=validation_examples, **rest)

    out = tmp_path_factory.mktemp("search") / "study"
    words = [*WORDS, "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", noted)
        patch.setattr(jobs, "_loaded", {})
        patch.setattr(search, "_tell", stop)
        assert main(words) == 130
    assert len(list(out.glob("trials/*/done.json"))) == 1
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    (out / "printed.json").write_text(printed.getvalue())
    (out / "held_out.json").write_text(json.dumps(held_out))
    return out


@pytest.mark.slow
def test_a_stopped_search_ends_and_prints_what_it_found(study):
    result = json.loads((study / "printed.json").read_text())
    assert result["best"]["values"].keys() == {"learning_rate"}
    prediction = result["prediction"]
    assert prediction["reference_batch_size"] == 512
    assert 0 <= prediction["low"] <= prediction["accuracy"] <= prediction["high"] <= 1
    known = [Norms.read(run).mean_square() for run in (study / "winner").iterdir()]
    assert prediction["mean_square"] == pytest.approx(sum(known) / 2)
    assert 0.1 < prediction["mean_square"] <= 1
    # Two runs, none repeated: it says that it should not be trusted.
    assert not prediction["trusted"]
    assert [each["number"] for each in result["trials"]] == [0, 1]
    cost = result["cost"]
    # 2 · 16 + 16 + 64 images for 512.
    assert cost["share_of_reference"] == pytest.approx(112 / 512, rel=1e-6)
    assert cost["trials_share"] == pytest.approx(32 / 512, rel=1e-6)
    spent = result["privacy"]["simulations_epsilon"]
    assert spent["16"] > spent["64"] > 3 * result["target"]["epsilon"]


@pytest.mark.slow
def test_the_report_says_what_is_not_private_and_stands_alone(study):
    page = (study / "report.html").read_text()
    assert "no privacy guarantee" in page
    assert "143 training examples were held out" in page
    assert "learning_rate" in page
    assert "Do not trust it" in page
    for trace in ("http://", "https://", "<script", "src="):
        assert trace not in page.replace("http://www.w3.org/2000/svg", "").replace(
            "http://www.w3.org/1999/xlink", ""
        ), trace
    for name in ("scaling.png", "scaling.svg"):
        assert (study / name).stat().st_size > 1000


@pytest.mark.slow
def test_a_search_reads_no_test_example(study):
    """Data without held-out examples are those whose test examples are in use."""
    held_out = json.loads((study / "held_out.json").read_text())
    assert held_out
    assert all(held_out)


@pytest.mark.slow
def test_simulations_leave_no_model_behind(study):
    names = {path.name for path in study.rglob("*") if path.is_file()}
    assert not any(name.endswith(".safetensors") for name in names)
    assert "seed.json" not in names
    assert len(list(study.glob("trials/*/run/ledger.jsonl"))) == 2


@pytest.mark.slow
def test_the_run_it_is_for_is_trained_from_the_study(study, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "digits", "--from-study", str(study)]) == 2
    assert "recipe (='digits') must be left out" in capsys.readouterr().err
    words = ["train", "--from-study", str(study), "--seed", "2", "--out", str(out)]
    assert main(words) == 0
    assert "predicted" in capsys.readouterr().out
    best = json.loads((study / "result.json").read_text())["best"]
    config = json.loads((out / "config.json").read_text())
    assert config["recipe"]["batch_size"] == 512
    assert config["recipe"]["noise_multiplier"] == 4
    assert config["recipe"]["steps"] == 12
    assert config["recipe"]["learning_rate"] == best["values"]["learning_rate"]
    assert config["examples"] == 1437
    assert config["study"]["trial"] == best["trial"]
    assert "The search in" in (out / "report.html").read_text()
    (obtained,) = json.loads((study / "obtained.json").read_text())
    assert obtained["batch_size"] == 512
    assert "obtained by" in (study / "report.html").read_text()


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_refused(study, capsys):
    assert main([*WORDS, "--clip-norm", "2", "--out", str(study)]) == 2
    error = capsys.readouterr().err
    assert "--clip-norm was 1.0 and is 2.0" in error and "folder (--out)" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "0"], "trials (=0) must be at least 1"),
        (
            ["--sampler", "grid", "--vary", "momentum", "dampening", "--trials", "24"],
            "trials (=24) must be at least 25, as many as combinations",
        ),
        (
            ["--simulation-batch-sizes", "0", "64"],
            "--simulation-batch-sizes (=0) must be at least 1",
        ),
        (["--simulation-batch-sizes", "1024"], "at most the target's batch size, 512"),
        (["--epsilon", "0.001", "--noise-multiplier", "1"], "epsilon (=0.001)"),
        (
            ["--private", "--pruner", "halving"],
            "--pruner (='halving') does not apply to --private",
        ),
        (
            ["--private", "--noise-multiplier", "2"],
            "--noise-multiplier (=2.0) must be left out of a private search",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, words, message, capsys):
    out = tmp_path / "study"
    assert main(["search", "digits", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not list(out.glob("trials/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--predict-examples", "100"],
            "--predict-examples (=100) must be at least 512",
        ),
        (["--try-examples", "0", "600"], "--try-examples (=0) must be at least 512"),
        (["--simulation-batch-size", "0"], "--simulation-batch-size (=0) must be at"),
        (["--simulation-batch-size", "600", "--flip"], "(=600) must be at most the"),
    ],
)
def test_a_table_of_data_that_cannot_be_is_refused_first(
    tmp_path, words, message, capsys
):
    short = ["--steps", "4", "--noise-multiplier", "4", "--out", str(tmp_path / "d")]
    assert main(["search", "data", "digits", *short, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_folders_that_are_no_study_are_refused(tmp_path, capsys):
    assert main(["search", "worker", str(tmp_path)]) == 2
    assert "has no study.json" in capsys.readouterr().err
    assert main(["train", "--from-study", str(tmp_path)]) == 2
    assert "has no result.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"has no result\.json"):
        search_page.write_report(tmp_path)


@pytest.mark.slow
def test_privacy_parameters_at_constant_noise(tmp_path, capsys, monkeypatch):
    words = ["search", "privacy", "digits", *SHORT, "--try-steps", "8"]
    words += ["--out", str(tmp_path / "p")]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["steps"], row["batch_size"]) for row in rows] == [(4, 512), (8, 362)]
    assert [row["learning_rate"] for row in rows] == [0.5, 0.25]
    assert [row["simulated_batch_size"] for row in rows] == [16, 11]
    for ending in ("png", "svg"):
        assert (tmp_path / f"p/table.{ending}").exists()
    # The same again, for people: nothing is trained.
    monkeypatch.setattr(*NOT_DRAWN)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.split()[:5] == ["steps", "batch", "size", "learning", "rate"]
    assert "best: --noise-multiplier 4.0 --steps" in printed


def test_the_last_name_that_varies_is_the_axis():
    found = Ablation(vary=("learning-rate=1,2", "optimizer=sgd,adam"))
    assert found.axis(["optimizer", "learning_rate"]) == "optimizer"


@pytest.mark.slow
def test_ablation_and_data(tmp_path, capsys, monkeypatch):
    words = [*SHORT, "--json", "--out", str(tmp_path / "a")]
    vary = ["--vary", "learning-rate=0.25,1"]
    assert main(["search", "ablation", "digits", *words, *vary]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["title"] for row in rows] == [
        {"learning_rate": 0.25},
        {"learning_rate": 1.0},
    ]
    words = [*SHORT, "--try-examples", "600", "1200", "--repeats", "1"]
    words += ["--out", str(tmp_path / "d")]
    assert main(["search", "data", "digits", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows, more = found["rows"], found["prediction"]
    assert [row["title"]["examples"] for row in rows] == [600, 1200]
    assert [len(row["runs"]) for row in rows] == [1, 1]
    assert experiments.Data().repeats == 2  # where no number is given
    assert rows[0]["epsilon"] > rows[1]["epsilon"]
    assert rows[0]["delta"] == pytest.approx(2 * rows[1]["delta"])
    # Section 4.4: twice the data at the same (B, sigma, S), half of delta.
    assert more["examples"] == more["prediction"]["batch_size"] == 2 * 1437
    assert more["delta"] == pytest.approx(rows[1]["delta"] * 1200 / 2874)
    assert more["epsilon"] < rows[1]["epsilon"]
    config = tmp_path / "d/runs/examples=600-0/config.json"
    assert json.loads(config.read_text())["examples"] == 600
    monkeypatch.setattr(*NOT_DRAWN)
    assert main(["search", "data", "digits", *words]) == 0
    assert "with 2874 examples: ε = " in capsys.readouterr().out


@pytest.mark.slow
def test_a_budget_is_searched_and_its_winner_trained_on_all(
    tmp_path, capsys, monkeypatch
):
    out = tmp_path / "b"
    words = ["search", "budget", "digits", *SHORT, "--out", str(out)]
    words += ["--vary", "batch-size=256,512", "steps=2", "learning-rate=0.5"]
    words += ["--winner-repeats", "2", "--account", str(tmp_path / "account.json")]
    words += ["--training-accuracy"]
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    rows, winner = found["rows"], found["winner"]
    assert [(row["batch_size"], row["steps"]) for row in rows] == [(256, 2), (512, 2)]
    assert [row["simulated_batch_size"] for row in rows] == [8, 16]
    assert all(0 < row["training_accuracy"] < 1 for row in rows)
    spent = [row["epsilon"] for row in rows]
    assert spent == pytest.approx([spent[0]] * 2, rel=2e-3)
    assert rows[0]["noise_multiplier"] < rows[1]["noise_multiplier"]
    assert "at the edge of the grid: batch size" in printed.err
    assert "learning rate" not in printed.err.split("at the edge")[-1]
    # The winner: all training examples, all its steps, two runs by other seeds.
    best = max(rows, key=lambda row: row["accuracy"])
    scores = winner["scores"]["accuracy"]
    assert scores["median"] == pytest.approx(sum(scores["runs"]) / 2)
    assert scores["deviation"] is not None
    setting = f"batch_size={best['batch_size']}-steps={best['steps']}-learning_rate=0.5"
    for number in ("1", "2"):
        folder = out / "winner" / setting / number
        config = json.loads((folder / "config.json").read_text())
        assert config["study"]["path"] == str(out.resolve())
        assert (
            "The search in b found these settings"
            in (folder / "report.html").read_text()
        )
        assert config["examples"] == 1437
        assert config["mechanism"]["steps"] == best["steps"]
        assert config["recipe"]["batch_size"] == best["batch_size"]
    assert winner["private"] is False  # by --seed
    assert winner["epsilon"] < winner["epsilon_together"] < 2 * winner["epsilon"]
    assert len(Account(tmp_path / "account.json").read().charges) == 2 + 2
    assert (out / "table.png").stat().st_size > 10_000
    # The same again, for people: nothing is trained. Another budget is refused.
    monkeypatch.setattr(*NOT_DRAWN)
    monkeypatch.setattr("tanager.report.run_figures.curves", lambda *_: "")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "again, on 1437 examples, none held out: NOT PRIVATE" in printed
    assert "on training examples" in printed
    assert f"{100 * rows[0]['training_accuracy']:.2f} %" in printed
    assert main([*words, "--noise-multiplier", "3"]) == 2
    error = capsys.readouterr().err
    assert "cannot be resumed: --noise-multiplier was 4.0 and is 3.0" in error
    assert main(words[:-1]) == 2
    error = capsys.readouterr().err
    assert "--training-accuracy was True and is False" in error


def test_a_table_refuses_what_makes_no_run_before_it_simulates(tmp_path, capsys):
    out = tmp_path / "a"
    words = ["search", "ablation", "digits", *SHORT, "--out", str(out)]
    assert main([*words, "--vary", "model=linear,lenet"]) == 2
    assert "image_height (=8) must be at least 16" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_cumulative_ablation_changes_one_after_another(tmp_path, capsys):
    out = tmp_path / "a"
    words = ["search", "ablation", "digits", *SHORT, "--json", "--out", str(out)]
    words += ["--evaluate-every", "2", "--cumulative"]
    words += ["--vary", "normalisation-order=none,post-activation", "ema-decay=0,0.9"]
    assert main(words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["title"]["change"] for row in rows] == [
        "none",
        "normalisation order from none to post-activation",
        "ema decay from 0.0 to 0.9",
    ]
    made = []
    for row in rows:
        run = out / f"runs/change={row['title']['change']}-0/config.json"
        recipe = json.loads(run.read_text())["recipe"]
        made.append((recipe["normalisation_order"], recipe["ema_decay"]))
    post = "post-activation"
    assert made == [("none", 0.0), (post, 0.0), (post, 0.9)]
    assert (out / "curves.png").stat().st_size > 10_000
    # Other first values have cells of the same names.
    assert main([*words[:-1], "ema-decay=0.5,0.9"]) == 2
    assert (
        "cannot be resumed: --ema-decay was 0.0 and is 0.5" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablation", "--cumulative", "--vary", "ema-decay=0.9"], "vary (=['ema_decay"),
        (
            ["ablation", "--vary", "epsilon=1,8", "steps=6", "noise-multiplier=2"],
            "vary (='epsilon') cannot be varied together",
        ),
        (
            ["data", "--simulation-batch-size=0"],
            "--simulation-batch-size (=0) must be at least 1",
        ),
        (["data", "--batch-size=512"], "error: --try-examples (=323) must be at"),
        (["privacy", "--try-steps=0"], "--try-steps (=0) must be at least 1"),
        (
            ["budget", "--vary", "batch-size=512,1437", "--simulation-batch-size=512"],
            "simulation-batch-size (=1437) must be at most the 1294 training examples",
        ),
        (
            ["budget", "--vary", "steps=2,4", "noise-multiplier=2,4"],
            "vary (=['noise_multiplier', 'steps']) changes ε, which this search keeps",
        ),
        (["budget", "--vary", "epsilon=1,8"], "vary (=['epsilon']) changes ε, which"),
    ],
)
def test_tables_that_cannot_be_are_refused_first(tmp_path, words, message, capsys):
    short = f"{FEW} --steps 4".split()
    words = ["search", words[0], "digits", *short, *words[1:]]
    assert main([*words, "--out", str(tmp_path / "t")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


GONE = jobs.Outcome(0.0, 1.0, 1.0, diverged=True)


def test_a_limit_must_have_room_for_simulations_and_winner(
    tmp_path, capsys, monkeypatch
):
    account, out = Account(tmp_path / "account"), tmp_path / "t"
    account.set_limit(8.0, 1e-5)  # two simulations and a run of the best spend 7.72
    monkeypatch.setattr(
        experiments, "work_through", lambda every, *_: [GONE for _ in every]
    )
    words = "search budget digits --model linear --epsilon 4 --noise-multiplier None "
    words += "--delta 1e-5 --batch-size 256 --steps 4 --simulation-batch-size 200 "
    words += f"--vary steps=2,4 --account {account.path} --out {out} --winner-repeats "
    diverged = "none of 2 settings got a held-out example right"
    assert main([*words.replace(str(out), f"{out}1").split(), "1"]) == 2
    assert diverged in capsys.readouterr().err
    words = [*words.split(), "3"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert diverged not in error
    assert not out.exists()
    told = "has a limit of ε = 8 at δ = 1e-05: 0 is spent, and all simulations and "
    assert f"{told}then the runs of the best would make it 8.624" in error
    assert error.count("\n") == 1
    command = re.search("`tanager (account limit .*)`", error)
    assert command and main(command[1].split()) == 0
    assert main(words) == 2
    assert diverged in capsys.readouterr().err


def test_repeats_have_seeds_and_folders_of_their_own(tmp_path, capsys):
    out = tmp_path / "runs"
    words = f"train digits {FEW} --steps 4 --out {out} --repeats 2 --account none"
    assert main([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == [f"{out}/1", f"{out}/2"]
    assert found == json.loads((out / "repeats.json").read_text())
    weights = [(out / n / "model.safetensors").read_bytes() for n in ("1", "2")]
    assert weights[0] != weights[1]
    seeds = [json.loads((out / n / "config.json").read_text()) for n in ("1", "2")]
    assert [each["recipe"]["seed"] for each in seeds] == [1, 2]
    assert found["epsilon_together"] > found["epsilon"]
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    said = "NOT PRIVATE (see the reports): median ± standard deviation of 2 runs: "
    assert f"{said}accuracy " in printed
    assert " % (test examples, average of parameters)" in printed
    assert found["private"] is False
    assert f"tensorboard --logdir {out}\n" in printed
    assert main([*words.split()[:-6], "--repeats", "0"]) == 2
    assert "repeats (=0) must be" in capsys.readouterr().err
    assert main(["train", "digits", "--repeats", "2", "--resume"]) == 2
    assert "resume (=True) finds one run only" in capsys.readouterr().err
    check_norms(out / "1", tmp_path, capsys)
    assert main(words.replace(str(out), str(out / "1")).split()) == 2
    assert "holds a single run: name another folder" in capsys.readouterr().err
    Account(tmp_path / "mine").set_limit(4.0, 1e-4)
    words = f"train digits --repeats 3 --account {tmp_path / 'mine'} --out "
    assert main([*words.split(), str(tmp_path / "new")]) == 2
    assert " is spent, and these 3 runs would make it " in capsys.readouterr().err


def check_norms(run, tmp_path, capsys):
    """What `tanager search norms` says of a run of four steps."""
    plot = tmp_path / "norms.png"
    words = ["norms", str(run), "--parts", "2", "--plot", str(plot)]
    assert main(["search", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PRIVATE")
    assert "a clipping norm to try" in printed
    assert re.search(r"those below [\d.]+ train alike", printed)
    assert plot.stat().st_size > 1000
    assert main(["search", *words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["steps"] == [2, 4]
    median = content["quantiles"]["0.5"]
    assert content["suggested_clip_norm"] == 1 < median  # as the Unlocking paper's
    assert f"adds {content['mean_square']:.3g}·B·C²" in printed
    assert main(["search", "norms", str(tmp_path)]) == 2
    assert "has no record of gradient norms" in capsys.readouterr().err
    assert main(["search", "norms", str(tmp_path / "nope")]) == 2
    assert "nope') does not exist: give the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "examples"),
    [
        ({}, 1437),
        ({"validation_examples": 137}, 1437),
        ({"train_examples": 1000}, 1000),
        ({"train_examples": 1000, "validation_examples": 137}, 1000),
    ],
)
def test_the_target_trains_on_all_examples(fields, examples):
    recipe = dataclasses.replace(recipes.get("digits").recipe, **fields)
    found = target_of("digits", recipe)
    assert found.examples == examples
    assert found.recipe.validation_examples == 0
