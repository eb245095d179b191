"""The tables that `tanager search budget`, `privacy`, `data` and `ablation` print."""

from tanager.commands import experiments


def test_a_pipe_is_given_every_value_of_a_row(tmp_path, capsys):
    title = {f"field_{number}": "x" * 30 for number in range(6)}
    row = {
        "title": title,
        "batch_size": 64,
        "learning_rate": 0.5,
        "epsilon": 2.0,
        "delta": 1e-5,
        "simulated_batch_size": 32,
        "accuracy": 0.75,
        "deviation": None,
        "training_accuracy": None,
    }
    experiments._print([row], tmp_path, "ablation", None)
    cells = [*title.values(), "64", "0.5", "2", "1e-05", "32", "75.00", "%", "←"]
    assert capsys.readouterr().out.splitlines()[1].split() == cells
