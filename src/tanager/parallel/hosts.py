"""Several hosts that run one program: who they are, and how they agree.

Each host runs the same `tanager.train`, as one process of JAX's distributed runtime.
What all must do at the same moment is a function of shared numbers, never of a host's
own clock or luck. The first host, the chief, writes the run's files and decides; the
others are told.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from tanager import _validate as validate
from tanager.parallel.watch import stopping


Outcome = TypeVar("Outcome")

SILENCE = 30.0
"""Seconds without a sign of life after which a host counts as gone."""

_PATIENCE = 7 * 24 * 3600 * 1000  # milliseconds that hosts wait for the chief's word
_GOODBYE = 60  # seconds that hosts wait for each other at the end
_words = 0
_watcher: subprocess.Popen[str] | None = None


class Stopped(KeyboardInterrupt):
    """All hosts have agreed to stop, because one of them was asked to."""


@contextlib.contextmanager
def together(
    coordinator: str | None = None,
    hosts: int | None = None,
    host: int | None = None,
    *,
    timeout: float = 300.0,
) -> Iterator[None]:
    """Be one of several hosts inside a `with` block; nothing is computed before it.

    An error that leaves the block ends the process, having told the other hosts.

    What is left out is found out where JAX can: under Slurm, Open MPI, Kubernetes and
    on Cloud TPUs. A watcher process is started beside this one
    (`tanager.parallel.watch`), on the port after the coordinator's; when a host is
    gone, the others print its name and end.

    Args:
        coordinator: ADDRESS:PORT of host 0, the port free there, and the next one too.
        hosts: how many processes there are.
        host: the number of this one, from 0.
        timeout: seconds to wait for the others to come.

    Raises:
        ValueError: something cannot be found out, or the numbers do not fit.
        TimeoutError: host 0 does not answer, or a host did not come.
        Stopped: all hosts have agreed to stop.
    """
    _join(coordinator, hosts, host, timeout)
    try:
        yield
    except Stopped:
        _leave()
        raise
    except BaseException as error:
        _fail(error)
    _leave()


def _join(
    coordinator: str | None, hosts: int | None, host: int | None, timeout: float
) -> None:
    global _watcher
    address, hosts, host, devices = _resolved(coordinator, hosts, host, timeout)
    where, _, port = address.rpartition(":")
    settings = {
        "host": host,
        "hosts": hosts,
        "name": socket.gethostname(),
        "address": (where.strip("[]"), _watchers_port(int(port))),
        "timeout": timeout,
        "silence": SILENCE,
    }
    _watcher = subprocess.Popen(
        [sys.executable, "-m", "tanager.parallel.watch", json.dumps(settings)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert _watcher.stdout is not None
    answer = json.loads(_watcher.stdout.readline() or '{"failed": "the watcher died"}')
    if "ready" not in answer:
        _watcher = None
        raise TimeoutError(answer.get("failed") or answer["lost"])
    threading.Thread(target=_listen, daemon=True).start()
    # A stopped run says so itself, and at once: JAX must not wait for signals or hosts.
    jax.config.update("jax_enable_preemption_service", False)
    # Hosts that wait for each other must not do so on the thread that listens to them.
    jax.config.update("jax_cpu_enable_async_dispatch", True)
    jax.distributed.initialize(
        address,
        hosts,
        host,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(timeout)),
        shutdown_timeout_seconds=_GOODBYE,
    )


def _leave() -> None:
    jax.distributed.shutdown()
    _say(finished=True)


def _fail(error: BaseException) -> NoReturn:
    if os.environ.get("TANAGER_TRACEBACK"):
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    print(f"tanager: error: {message}", file=sys.stderr)
    _say(failed=message)
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: an orderly exit would wait for the other hosts, and where the chief is
    # told and ends first, JAX aborts this process.
    os._exit(1)


def _say(**message: Any) -> None:
    assert _watcher is not None and _watcher.stdin is not None
    try:
        print(json.dumps(message), file=_watcher.stdin, flush=True)
    except OSError:
        return  # It had gone before, and said why.


def _listen() -> None:
    assert _watcher is not None and _watcher.stdout is not None
    for line in _watcher.stdout:
        message = json.loads(line)
        if "lost" in message:
            print(stopping(message["lost"]), file=sys.stderr, flush=True)
            # The main thread may wait in a collective, which nothing interrupts.
            os._exit(1)


def _watchers_port(coordinators: int) -> int:
    return coordinators + 1 if coordinators < 65535 else coordinators - 1


def _resolved(
    coordinator: str | None, hosts: int | None, host: int | None, timeout: float
) -> tuple[str, int, int, Any]:
    """Return coordinator, number of hosts, number of this one, and its devices."""
    devices = None
    given = {"coordinator": coordinator, "hosts": hosts, "host": host}
    if None in given.values():
        # What `jax.distributed.initialize` does itself, done before it, so that those
        # who do not come can be named.
        from jax._src.clusters import ClusterEnv

        found = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
            hosts,
            host,
            None,
            None,
            int(timeout),
        )
        coordinator, hosts, host, devices = found
        for name, value in zip(given, found, strict=False):
            if value is None:
                validate.refuse(
                    name,
                    None,
                    "must be given: no cluster was found that tells it",
                    "Slurm, Open MPI, Kubernetes and Cloud TPU do",
                )
    assert coordinator is not None and hosts is not None and host is not None
    if not coordinator.rpartition(":")[2].isdigit():
        validate.refuse("coordinator", coordinator, "must be ADDRESS:PORT")
    validate.whole(hosts=hosts, at_least=1)
    validate.whole(host=host, at_least=0)
    if host >= hosts:
        validate.refuse("host", host, f"must be below the number of hosts, {hosts}")
    return coordinator, hosts, host, devices


def count() -> int:
    """Return how many hosts take part; 1 where nothing was started."""
    return jax.process_count()


def is_chief() -> bool:
    """Return whether this is the host that writes the run's files."""
    return jax.process_index() == 0


def from_chief(function: Callable[[], Any]) -> Any:
    """Run a function on the chief, and return on every host what it returned.

    Args:
        function: returns what JSON can hold, and no secret: it travels the network.

    Raises:
        ValueError: the function raised it on the chief.
        OSError: likewise.
    """
    if count() == 1:
        return function()
    if not is_chief():
        word = json.loads(_store().blocking_key_value_get(_next_word(), _PATIENCE))
        if "error" in word:
            kind = {"ValueError": ValueError, "OSError": OSError}[word["kind"]]
            raise kind(f"host 0: {word['error']}")
        return word["value"]
    key = _next_word()
    try:
        value = function()
    except (ValueError, OSError) as error:
        kind = "ValueError" if isinstance(error, ValueError) else "OSError"
        _store().key_value_set(key, json.dumps({"kind": kind, "error": str(error)}))
        raise
    _store().key_value_set(key, json.dumps({"value": value}))
    return value


def chief_first(function: Callable[[], Outcome]) -> Outcome:
    """Run a function on the chief, and when it is done there, on all others.

    Raises:
        ValueError: the function raised it, here or on the chief.
        OSError: likewise.
    """
    made: list[Outcome] = []

    def run() -> None:
        made.append(function())

    from_chief(run)
    return made[0] if made else function()


def total(*numbers: int) -> tuple[int, ...]:
    """Return for each number its sum over all hosts: the same answer on all."""
    if count() == 1:
        return numbers
    from jax.experimental import multihost_utils

    everyone = multihost_utils.process_allgather(np.array(numbers, np.int32))
    return tuple(int(number) for number in np.sum(everyone, axis=0))


def require_same(what: str, fingerprint: str) -> None:
    """Refuse to go on where hosts hold different things.

    Args:
        what: the name of what must be the same.
        fingerprint: of what this host holds; it travels the network.

    Raises:
        ValueError: on every host, naming those that differ from the chief.
    """
    if count() == 1:
        return
    from jax.experimental import multihost_utils

    mine = np.frombuffer(fingerprint.encode().ljust(64)[:64], np.uint8)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    odd = np.flatnonzero(np.any(everyone != everyone[0], axis=1))
    if odd.size:
        validate.refuse(
            what,
            f"on host {', '.join(map(str, odd))}",
            "differs from what host 0 has",
            "all hosts must read the same files with the same command",
        )


def _store() -> Any:
    # JAX's own key-value store has no public name; orbax reaches it like this too.
    from jax._src.distributed import global_state

    return global_state.client


def _next_word() -> str:
    global _words
    _words += 1
    return f"tanager/word/{_words}"
