import json
import re

import pytest

from tanager.commands import plan
from tanager.report import plan_figures


ARGUMENTS = ["--examples", "50000", "--batch-size", "4096", "--steps", "2500"]
ARGUMENTS += ["--delta", "1e-5"]


def test_json_is_one_object_and_nothing_else(capsys):
    assert plan.run([*ARGUMENTS, "--noise-multiplier", "3", "--json"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert captured.err == ""
    assert set(record) >= {
        *("examples", "batch_size", "sample_rate", "steps", "epochs", "delta"),
        *("noise_multiplier", "adjacency", "epsilon", "eta", "eta_step"),
        *("total_noise", "risk", "solved", "warnings"),
    }
    assert record["epsilon"]["rdp"] == pytest.approx(7.1, abs=0.05)
    assert record["epsilon"]["pld"] < record["epsilon"]["rdp"]


def test_json_without_noise_is_still_json(capsys):
    plan.run([*ARGUMENTS, "--noise-multiplier", "0", "--json"])

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert record["epsilon"] == dict.fromkeys(["pld", "rdp", "gdp_clt", "tan"])


def test_the_table_says_what_is_a_guarantee(capsys):
    plan.run([*ARGUMENTS, "--noise-multiplier", "3"])
    lines = capsys.readouterr().out.splitlines()

    def line(start):
        (found,) = [text for text in lines if text.startswith(start)]
        return " ".join(found.split())

    assert line("PLD") == "PLD 6.579 the guarantee ← solved for"
    assert line("RDP").startswith("RDP 7.099 a guarantee, looser")
    assert line("GDP-CLT").endswith("approximation, never a guarantee")
    assert line("TAN").endswith("approximation, never a guarantee")
    in_words = line("Take someone who guesses")
    assert "with the model at most 75.8 %" in in_words
    assert "they recognise at most 17.8 % of the members" in in_words
    assert line("right guesses, where").endswith("members 75.8 % 50 %")
    recognised = "members recognised at"
    assert line(f"{recognised} 0.1 %") == f"{recognised} 0.1 % false alarms 4.6 % 0.1 %"
    assert line(f"{recognised} 1 %") == f"{recognised} 1 % false alarms 17.8 % 1 %"
    assert line("members recognised minus").endswith("51.5 % 0 %")
    assert line("μ of Gaussian DP") == "μ of Gaussian DP 1.42 (regret 0.004) 0"
    assert line("adjacency") == "adjacency zero-out"
    assert line("signal to noise η") == "signal to noise η 0.9654"
    assert line("η of one step") == "η of one step 0.01931"
    assert line("total noise Σ") == "total noise Σ = 1/η 1.036"


@pytest.mark.parametrize("words", ["5000 100 3", "1437 300 3"])
def test_noise_that_is_typed_as_it_was_shown_keeps_the_budget(capsys, words):
    """To the nearest, these noise multipliers spend 3.001."""
    examples, steps, epsilon = words.split()
    settings = ["--examples", examples, "--steps", steps, "--batch-size", "256"]
    plan.run([*settings, "--epsilon", epsilon])
    (shown,) = re.findall(r"noise multiplier σ +(\S+) ", capsys.readouterr().out)
    plan.run([*settings, "--noise-multiplier", shown])
    assert re.search(rf"PLD +{epsilon} +the guarantee", capsys.readouterr().out)


def test_the_table_marks_what_was_solved_for_and_warns(capsys):
    arguments = "--examples 50000 --steps 2500 --noise-multiplier 0.5 --epsilon 8"
    plan.run([*arguments.split(), "--adjacency", "replace-one"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"batch size B \d+ ← solved for", text)
    assert text.count("← solved for") == 1
    assert "RDP — not defined for replace-one" in text
    assert "Warning: privacy wall: with a noise multiplier of 0.5" in text


def test_bad_input_is_one_message():
    with pytest.raises(ValueError, match="give three of --batch-size"):
        plan.run(ARGUMENTS)
    with pytest.raises(ValueError, match="did you mean replace-one"):
        plan.run([*ARGUMENTS, "--epsilon", "8", "--adjacency", "replace"])


def test_a_plot_can_be_asked_for(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(plan_figures, "plot", lambda plan, path: drawn.append(path))
    words = [*ARGUMENTS, "--noise-multiplier", "3", "--plot", str(tmp_path / "p.svg")]
    plan.run([*words, "--json"])
    json.loads(capsys.readouterr().out)
    plan.run(words)
    assert f"Drawn to {tmp_path}" in capsys.readouterr().out
    assert drawn == [tmp_path / "p.svg"] * 2


def test_smaller_and_larger_batches_are_shown_with_their_price(tmp_path, capsys):
    words = [*ARGUMENTS, "--noise-multiplier", "3", "--cheapest"]
    assert plan.run([*words, "--plot", str(tmp_path / "frontier.svg")]) == 0
    text = capsys.readouterr().out
    assert re.search(r"2048 +1\.5 .* 0\.5 +dear in ε *\n", text)
    assert re.search(r"4096 +3 +6\.579 .* % +1 +this plan +cheapest *\n", text)
    assert re.search(r"8192 +6 .* 2 +dear in compute *\n", text)
    assert "half that batch: ε = 7.4, 12 % more, for half the compute" in text
    assert "twice that batch: ε = 6.38" in text
    assert (tmp_path / "frontier.svg").read_text().startswith("<?xml")
    assert plan.run([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    own = [point for point in record["frontier"] if point["compute"] == 1]
    assert own == [
        {
            "batch_size": 4096,
            "noise_multiplier": 3,
            "epsilon": record["epsilon"]["pld"],
            "compute": 1,
            "cheapest": True,
        }
    ]
    with pytest.raises(ValueError, match="without noise no batch has a finite"):
        plan.run([*ARGUMENTS, "--noise-multiplier", "0", "--cheapest"])


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], "--batch-size, --steps"),
        (
            ["--noise-multiplier=3", "--epsilon=8"],
            "--batch-size, --steps, --noise-multiplier, --epsilon",
        ),
    ],
)
def test_all_but_one_are_asked_for_by_their_flags(words, given):
    with pytest.raises(ValueError, match="give three of --batch-size") as refused:
        plan.run([*ARGUMENTS, *words])
    assert str(refused.value).endswith(f"; given: {given}")


def test_an_epsilon_that_protects_next_to_nothing_is_warned_of(capsys):
    plan.run([*ARGUMENTS, "--epsilon", "19"])
    assert "next to nothing" not in capsys.readouterr().out
    plan.run([*ARGUMENTS, "--epsilon", "21"])
    assert "Warning: an ε this large protects next to nothing." in (
        capsys.readouterr().out
    )
