"""Several hosts on the loopback interface: the same training; and when one is gone."""

import json
import os
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from forks import Fork
from switch import FULL
from tanager.parallel import hosts
from tanager.privacy.account import Account
from tanager.privacy.ledger import Ledger


SCRIPT = Path(__file__).parent / "one_host.py"
ME = socket.gethostname()


def free_port():
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


RUNS = {
    "plain": {},
    "counts": {"shard": True, "balanced": True},
    "rare": {"sample_rate": 0.05, "held": False, "bad": list(range(0, 60, 3))},
}
REFUSED = {
    name: {"refused": True, "own": {"1": {name: value}}}
    for name, value in (
        ("noise_multiplier", 0.002),
        ("sample_rate", 0.9),
        ("clip_norm", 1.9),
    )
}
"""One host's σ, q or C would be in the sum, and the chief's in the ledger."""
OTHER_DATA = {"refused": True, "data": {"1": 7}}


class Hosts:
    """What became of the processes: exit codes, what they said, what they computed.

    They start `runs` one after the other, each in the folder that is its name.
    """

    def __init__(self, folder, count, runs=None, **settings):
        self.folder, self.count = folder, count
        runs = {
            name: {"out": str(folder / name / "run")} | changes
            for name, changes in (runs or {"": {}}).items()
        }
        for name in runs:
            (folder / name).mkdir(parents=True, exist_ok=True)
        common = {"hosts": count, "port": free_port(), "runs": list(runs.values())}
        file = folder / "settings.json"
        file.write_text(json.dumps(common | settings))
        surroundings = {**os.environ, "TANAGER_CACHE_DIR": str(folder / "cache")}
        forks = [
            Fork(SCRIPT, [file, str(host)], environment=surroundings)
            for host in settings.get("started", range(count))
        ]
        for fork in forks:
            fork.wait()
        self.out = [fork.out for fork in forks]
        self.errors = [fork.errors for fork in forks]
        self.codes = [fork.code for fork in forks]

    def parameters(self, name=""):
        assert self.codes == [0] * len(self.codes), self.errors
        first, *others = (
            np.load(self.folder / name / f"run-{host}.npy")
            for host in range(self.count)
        )
        for other in others:
            np.testing.assert_array_equal(first, other)
        return first


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One host, with whole parameters."""
    runs = {name: run | {"shard": False} for name, run in RUNS.items()}
    return Hosts(tmp_path_factory.mktemp("alone"), 1, runs)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two hosts; at first, one has other settings, or other data."""
    runs = REFUSED | {"data": OTHER_DATA} | RUNS
    del runs["plain"]  # with counts, all that and more
    return Hosts(tmp_path_factory.mktemp("two"), 2, runs)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_hosts_that_stream_train_as_one_does(tmp_path, alone, count):
    several = Hosts(tmp_path, count, held=False).parameters()
    np.testing.assert_array_equal(several, alone.parameters("plain"))


@pytest.mark.slow
def test_hosts_train_as_one_does(two, alone):
    """In shares, with class counts that are charged once.

    Whole parameters, and streamed examples: where a host dies or is stopped.
    """
    expected = alone.parameters("counts")
    np.testing.assert_array_equal(two.parameters("counts"), expected)
    assert json.loads(two.out[0].splitlines()[-1])["devices"] == 4
    assert np.max(np.abs(expected)) > 0.1
    found = []
    for folder in (two.folder / "counts", alone.folder / "counts"):
        config = json.loads((folder / "run/config.json").read_text())
        found.append(config["noisy_counts"])
        ledger = Ledger.read(folder / "run/ledger.jsonl").mechanisms()
        assert [each.steps for each in ledger] == [1, 12]
        [charge] = Account(folder / "account").read().charges.values()
        assert [each.steps for each in charge.mechanisms] == [1, 12]
    assert found[0] == found[1]
    assert len(set(found[0]["weights"])) > 1


@pytest.mark.slow
def test_empty_shares_and_unreadable_examples_do_not_set_hosts_apart(two, alone):
    np.testing.assert_array_equal(two.parameters("rare"), alone.parameters("rare"))
    lines = []
    for ran in (two, alone):
        text = (ran.folder / "rare/run/private/metrics.jsonl").read_text()
        found = [json.loads(line) for line in text.splitlines()]
        lines.append([(line["examples"], line["unreadable"]) for line in found])
    assert lines[0] == lines[1]
    sizes, skipped = zip(*lines[0], strict=True)
    # At 32 rows for two hosts of two devices, most shares are empty.
    assert min(sizes) <= 1 < max(sizes) < 16
    assert max(skipped) > 0


@pytest.mark.slow
def test_hosts_with_other_settings_are_refused_before_a_charge(two):
    for out in two.out:
        *errors, data = re.findall(r"^refused: (.*)$", out, flags=re.M)
        assert len(errors) == len(REFUSED)
        for error in errors:
            assert "settings (='on host 1') differs from what host 0 has" in error
        assert "data (='on host 1') differs from what host 0 has" in data
    for name in (*REFUSED, "data"):
        assert not (two.folder / name / "run/ledger.jsonl").exists()
        assert not (two.folder / name / "account").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_host_dies_the_others_name_it_and_the_run_goes_on(
    tmp_path, alone, victim
):
    settings = {"silence": 6, "checkpoint_seconds": 0.0}
    killed = Hosts(tmp_path, 2, victim=victim, signal="SIGKILL", **settings)
    assert killed.codes[victim] < 0
    assert killed.codes[1 - victim] != 0
    error = killed.errors[1 - victim]
    if victim == 0 and "tanager: " not in error:
        # JAX's own threads may end a process first whose service is gone.
        assert "JAX distributed service detected fatal errors" in error
    else:
        assert f"host {victim} ({ME}) is gone" in error
        assert "Run the same command again, with the run's folder" in error
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 8
    if victim == 0 and not FULL:
        return  # the chief writes all there is: what it leaves is the same
    # Step 8 comes again, bit by bit, and counts once.
    resumed = Hosts(tmp_path, 1 + victim).parameters()
    np.testing.assert_array_equal(resumed, alone.parameters("plain"))
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 12


@pytest.mark.slow
def test_stopped_hosts_write_a_checkpoint_and_one_goes_on_alone(tmp_path, alone):
    stopped = Hosts(tmp_path, 2, victim=1, signal="SIGTERM", held=False)
    assert all("hosts.Stopped" in error for error in stopped.errors)
    assert not any("is gone" in error for error in stopped.errors)
    # Asked while it evaluated step 8; they agree at the end of the next.
    assert Ledger.read(tmp_path / "run/ledger.jsonl").steps() == 9
    resumed = Hosts(tmp_path, 1).parameters()
    np.testing.assert_array_equal(resumed, alone.parameters("plain"))


@pytest.mark.slow
def test_an_error_of_one_host_is_told_to_the_others(tmp_path):
    failed = Hosts(tmp_path, 2, fails=1)
    reason = "the disk of this host is on fire"
    assert failed.codes == [1, 1]
    assert f"host 1 ({ME}) stopped: {reason}" in failed.errors[0]
    assert failed.errors[1].endswith(f"tanager: error: {reason}\n")


@pytest.mark.parametrize("place", [0, 63])
def test_hosts_are_the_same_in_all_of_a_fingerprint(monkeypatch, place):
    def gathered(mine):
        other = mine.copy()
        other[place] += 1
        return np.stack([mine, mine, other])

    monkeypatch.setattr(hosts, "count", lambda: 3)
    monkeypatch.setattr(hosts, "_gathered", lambda mine: np.stack([mine] * 3))
    hosts.require_same("data", "a" * 64)
    monkeypatch.setattr(hosts, "_gathered", gathered)
    with pytest.raises(ValueError, match=r"data \(='on host 2'\) differs from what"):
        hosts.require_same("data", "a" * 64)


def test_the_chief_goes_first_its_error_is_that_of_all_and_sums_are_of_all(monkeypatch):
    called = []
    hosts.chief_first(lambda: called.append(1))
    assert called == [1]
    said = json.dumps({"error": "no room", "of_system": True})
    store = SimpleNamespace(blocking_key_value_get=lambda *of: said)
    for name, value in (("_store", store), ("count", 2), ("is_chief", False)):
        monkeypatch.setattr(hosts, name, lambda value=value: value)
    with pytest.raises(OSError, match="host 0: no room"):
        hosts.from_chief(dict)
    monkeypatch.setattr(hosts, "_gathered", lambda array: np.stack([array, array]))
    assert hosts.total(3, 0) == (6, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coordinator": "10.0.0.1"}, "coordinator (='10.0.0.1') must be ADDRESS:PORT"),
        ({"hosts": 0}, "hosts (=0) must be at least 1"),
        ({"host": -1}, "host (=-1) must be at least 0"),
        ({"host": None}, "host (=None) must be given here: give coordinator, hosts"),
        ({"hosts": 1, "host": 1}, "host (=1) must be below the number of hosts, 1"),
    ],
)
def test_bad_numbers_are_refused(changes, message, monkeypatch):
    started = "jax._src.xla_bridge.backends_are_initialized"
    monkeypatch.setattr(started, lambda: False)  # by tests before, in this process
    given = {"coordinator": "127.0.0.1:1", "hosts": 1, "host": 0} | changes
    with pytest.raises(ValueError, match=re.escape(message)), hosts.together(**given):
        pass
    assert jax.config.values["jax_enable_preemption_service"]


def test_a_port_that_is_taken_is_told(monkeypatch):
    def taken(*of, **more):
        raise RuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", taken)
    message = r"Failed to start RPC server\. Is the port of the coordinator taken"
    with pytest.raises(OSError, match=message), hosts.together("here:1", 2, 0):
        pass


def test_a_coordinator_that_does_not_answer_is_named(tmp_path):
    lonely = Hosts(tmp_path, 2, started=[1], timeout=1)
    assert lonely.codes == [1]
    assert "TimeoutError: host 0 does not answer at 127.0.0.1:" in lonely.errors[0]
    assert "for 1 s" in lonely.errors[0]


def test_hosts_wait_only_so_long_for_one_that_does_not_come(tmp_path):
    waiting = Hosts(tmp_path, 3, started=[0, 2], timeout=4, beat=1.0)
    assert waiting.codes == [1, 1]
    for error in waiting.errors:
        assert "tanager: not all hosts came in 4 s" in error


class Store:
    """Answers of JAX's service: who is alive, each with the number of its process."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def get_live_nodes(self, hosts):
        answer = next(self.answers, None)
        if answer is None:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no answer")
        return answer

    def key_value_try_get(self, name):
        return "other"


class Ended(Exception):
    pass


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{0: 5, 1: 6}] * 3 + [{0: 5}], "host 1 (other) is gone"),
        ([{0: 5, 1: 6}, {0: 5, 1: 7}], "host 1 (other) is gone"),
        ([{0: 5, 1: 6}] * 3, "JAX does not say who is alive (UNAVAILABLE: no answer)"),
    ],
    ids=["silent", "started again", "no answer"],
)
def test_the_watch_ends_a_host(monkeypatch, answers, message):
    def end(text):
        raise Ended(text)

    runtime = SimpleNamespace(num_processes=2, process_id=0)
    monkeypatch.setattr(hosts, "_runtime", lambda: runtime)
    monkeypatch.setattr(hosts, "_end", end)
    monkeypatch.setattr(hosts, "_BEAT", 0.01)
    monkeypatch.setattr(hosts, "SILENCE", 0.05)
    monkeypatch.setattr(hosts, "_leaving", threading.Event())
    store = Store(*answers)
    with pytest.raises(Ended, match=re.escape(message)):
        hosts._watch_others(store)
    assert next(store.answers, None) is None  # no end before the last answer


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_a_collective_that_breaks_leaves_it_to_the_watch_to_name_the_host(
    monkeypatch, kind
):
    def named(seconds):
        assert seconds > hosts.SILENCE
        raise Ended

    monkeypatch.setattr(hosts.time, "sleep", named)
    with pytest.raises(Ended):
        hosts._fail(kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer"))
