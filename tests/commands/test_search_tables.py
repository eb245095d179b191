"""The tables that `tanager search budget`, `privacy`, `data` and `ablation` print."""

from tanager.commands import experiments


ROW = {
    "title": {},
    "batch_size": 64,
    "steps": 100,
    "noise_multiplier": 1.37725,
    "learning_rate": 0.5,
    "epsilon": 2.0,
    "delta": 1e-5,
    "accountant": "rdp",
    "simulated_batch_size": 32,
    "accuracy": 0.75,
    "deviation": None,
    "training_accuracy": None,
}


def test_a_pipe_is_given_every_value_of_a_row(tmp_path, capsys):
    title = {f"field_{number}": "x" * 30 for number in range(6)}
    experiments._print([ROW | {"title": title}], tmp_path, "ablation", None)
    cells = [*title.values(), "64", "0.5", "1.377", "2", "1e-05", "32", "75.00"]
    headings, row, *_ = capsys.readouterr().out.splitlines()
    assert row.split() == [*cells, "%", "←"]
    assert "learning rate σ ε δ" in " ".join(headings.split())


def test_the_best_row_can_be_typed_again(tmp_path, capsys):
    row = ROW | {"noise_multiplier": 1.3772512345, "learning_rate": 1 / 3}
    experiments._print([row], tmp_path, "budget", None)
    typed = "--noise-multiplier 1.3772512345 --steps 100 --batch-size 64"
    typed += f" --learning-rate {1 / 3}, ε = 2 at δ = 1e-05 by RDP"
    assert f"best: {typed}" in " ".join(capsys.readouterr().out.split())


def test_no_delta_is_rounded_down_beside_its_epsilon(tmp_path, capsys):
    told = {"accuracy": 0.7, "low": 0.6, "high": 0.8, "confidence": 0.9}
    more = {"examples": 9, "epsilon": 1.0, "delta": 2.3449e-5, "prediction": told}
    experiments._print([ROW | {"delta": 1.2349e-5}], tmp_path, "data", more)
    printed = capsys.readouterr().out
    assert "1.2349e-05" in printed
    assert "at δ = 2.3449e-05" in " ".join(printed.split())
