"""Metrics are written once each, on resume too, and TensorBoard can read them."""

import json

from tensorboardX.proto.event_pb2 import Event

from tanager._reading import read_json_lines
from tanager.training.metrics import Metrics
from tanager.training.run_folder import RunFolder


def events_of(folder):
    """Parse TensorBoard's event files: length, checksum, message, checksum."""
    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


def write(folder, begun, steps):
    run = RunFolder(folder)
    run.seed(1)
    metrics = Metrics(run, begun)
    for step in steps:
        metrics.release({"step": step, "epsilon": step / 10, "test_accuracy": 0.5})
        metrics.keep({"step": step, "loss": 1.0})
    metrics.close()
    return metrics


def test_lines_after_the_checkpoint_are_replaced(tmp_path):
    write(tmp_path, 0, [2, 4, 6])
    resumed = write(tmp_path, 4, [6, 8])
    assert [line["step"] for line in resumed.released] == [2, 4, 6, 8]
    for path in (tmp_path / "metrics.jsonl", tmp_path / "private/metrics.jsonl"):
        assert [line["step"] for line in read_json_lines(path)] == [2, 4, 6, 8]


def test_a_torn_line_is_passed_over(tmp_path):
    write(tmp_path, 0, [2, 4])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "eps')
    assert [line["step"] for line in read_json_lines(path)] == [2, 4]
    assert [line["step"] for line in write(tmp_path, 4, []).released] == [2, 4]


def test_tensorboard_gets_every_released_number_and_no_private_one(tmp_path):
    write(tmp_path, 0, [2, 4])
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events_of(tmp_path)
        for value in event.summary.value
    }
    assert {tag for tag, _ in scalars} == {"epsilon", "test_accuracy"}
    assert scalars["test_accuracy", 4] == 0.5
    starts = [event.step for event in events_of(tmp_path) if event.session_log.status]
    assert starts == [1]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    metrics = Metrics(RunFolder(tmp_path), 0)
    metrics.release({"step": 1, "epsilon": float("inf")})
    metrics.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "epsilon": None}
