"""Several hosts that run one program: who they are, and how they agree.

Each host runs the same `tanager.train`, as one process of JAX's distributed runtime.
What all must do at the same moment is a function of shared numbers, never of a host's
own clock or luck. The first host, the chief, writes the run's files and decides for
all.

JAX's coordination service on the chief hears the heartbeats of all hosts. A host that
waits for another in a collective would wait for ever, so a thread of each host asks the
service who is alive, and ends the process when a host is gone.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from tanager import _validate as validate


Outcome = TypeVar("Outcome")

SILENCE = 30
"""Seconds without a heartbeat after which a host counts as gone."""

_PATIENCE = 7 * 24 * 3600 * 1000  # milliseconds that hosts wait for the chief's word
_GOODBYE = 60  # seconds that hosts wait for each other at the end
_BEAT = 1.0  # seconds between two looks at who is alive
_FAILED = "tanager/failed"
_STATUS = re.compile("[A-Z_]+: ")  # how an error of JAX's runtime begins
_words = 0
_leaving = threading.Event()
_alone = threading.Event()
_watching: list[threading.Thread] = []


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
    """Be one of several hosts inside a `with` block; compute nothing before it.

    An error that leaves the block ends the process, after the other hosts were told.
    When a host is gone, or does not come, the others say so and end.

    JAX fills in what is left out, where it can: under Slurm, Open MPI, Kubernetes and
    on Cloud TPUs.

    Args:
        coordinator: ADDRESS:PORT of host 0; the port must be free there.
        hosts: how many processes there are.
        host: the number of this one, from 0.
        timeout: seconds to wait for the others to come.

    Raises:
        ValueError: an argument is missing and JAX cannot fill it in, or the numbers do
            not fit.
        TimeoutError: host 0 does not answer.
        OSError: JAX cannot join the hosts, or this host was started again alone.
        Stopped: all hosts have agreed to stop.
    """
    with _settings():
        _join(coordinator, hosts, host, timeout)
        try:
            yield
        except Stopped:
            _leave()
            raise
        except BaseException as error:
            _fail(error)
        _leave()


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    wanted = {
        # A stopped run says so itself, and at once: JAX must not wait for signals.
        "jax_enable_preemption_service": False,
        # Otherwise JAX aborts the others before they can name the host that is gone.
        "jax_enable_recoverability": True,
        # Hosts that wait for each other must not do so on the thread that serves them.
        "jax_cpu_enable_async_dispatch": True,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _join(
    coordinator: str | None, hosts: int | None, host: int | None, timeout: float
) -> None:
    named = {"coordinator": coordinator, "hosts": hosts, "host": host}
    missing = [name for name, value in named.items() if value is None]
    if hosts is not None:
        validate.whole(hosts=hosts, at_least=1)
    if host is not None:
        validate.whole(host=host, at_least=0)
        if hosts is not None and host >= hosts:
            validate.refuse("host", host, f"must be below the number of hosts, {hosts}")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        validate.refuse("coordinator", coordinator, "must be ADDRESS:PORT")
    if coordinator is not None and host:
        _require_answer(coordinator, timeout)
    # JAX aborts a process that waits too long, so this one ends itself before.
    late = threading.Timer(timeout, _end, [f"not all hosts came in {timeout:g} s"])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            coordinator,
            hosts,
            host,
            cluster_detection_method=None if missing else "deactivate",
            initialization_timeout=int(timeout) + 30,
            heartbeat_timeout_seconds=SILENCE,
            shutdown_timeout_seconds=_GOODBYE,
        )
    except ValueError as error:
        if not missing or "defined" not in str(error):
            raise
        remedy = "give coordinator, hosts and host; JAX finds them itself only under "
        remedy += "Slurm, Open MPI, Kubernetes and on Cloud TPUs"
        validate.refuse(missing[0], None, "must be given here", remedy)
    except RuntimeError as error:
        raise OSError(
            f"JAX cannot start its distributed service: {_first_line(error)}. Is the "
            "port of the coordinator taken on host 0? Name a free one to all hosts"
        ) from error
    finally:
        late.cancel()
    _leaving.clear()
    _alone.clear()
    try:
        _store().key_value_set(f"tanager/name/{_me()}", socket.gethostname())
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise OSError(f"JAX cannot join the hosts: {_first_line(error)}") from error
        raise OSError(
            f"host {_me()} took part before and was started again alone: end all hosts "
            "and start them together, which resumes from the last checkpoint"
        ) from error
    for watch in (_watch_others, _listen):
        thread = threading.Thread(target=watch, args=(_store(),), daemon=True)
        thread.start()
        _watching.append(thread)


def _require_answer(address: str, timeout: float) -> None:
    where, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((where.strip("[]"), int(port)), _BEAT).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"host 0 does not answer at {address} for {timeout:g} s ({error}): "
                    "start it, or correct the address"
                ) from error
        time.sleep(min(_BEAT, timeout / 20))


def _leave() -> None:
    _leaving.set()
    try:
        _store().wait_at_barrier("tanager/leave", 1000 * _GOODBYE)
    except jax.errors.JaxRuntimeError:
        _end(
            "a host is gone at the end; run the same command again, with the run's "
            "folder as --out, to complete the run"
        )
    if _me() == 0:
        # JAX aborts a host that says goodbye to a service that has ended.
        _alone.wait(_GOODBYE)
    jax.distributed.shutdown()
    # Python ends threads that are left in C++ at its exit, and C++ then aborts.
    while _watching:
        _watching.pop().join(5 * _BEAT)


def _fail(error: BaseException) -> NoReturn:
    if os.environ.get("TANAGER_TRACEBACK"):
        traceback.print_exception(error)
    message = str(error) or type(error).__name__
    # Some parts of JAX raise its errors as a ValueError.
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(message)
    if of_jax and "RESOURCE_EXHAUSTED" not in message:
        # A collective breaks where a host is gone: give the watch time to name it.
        time.sleep(SILENCE + 5 * _BEAT)
    print(f"tanager: error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    _leaving.set()
    here = f"host {_me()} ({socket.gethostname()})"
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _store().key_value_set(_FAILED, f"{here} stopped: {message}")
    _exit()


def _watch_others(store: Any) -> None:
    """End this process when a host has sent no heartbeat for too long."""
    everyone, failures = list(range(_runtime().num_processes)), 0
    started: dict[int, int] = {}  # a process that is started again has another number
    while True:
        try:
            # Every host asks, and all get the answer together.
            alive = store.get_live_nodes(everyone)
        except jax.errors.JaxRuntimeError as error:
            if _leaving.is_set():
                return
            failures += 1
            if failures * _BEAT >= SILENCE:
                _stop(f"JAX does not say who is alive ({_first_line(error)})")
        else:
            failures = 0
            if set(alive) <= {_me()}:
                _alone.set()
            for host in everyone:
                process = alive.get(host)
                if process is None or started.setdefault(host, process) != process:
                    _stop(f"host {host} ({_name_of(store, host)}) is gone")
        time.sleep(_BEAT)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _name_of(store: Any, host: int) -> str:
    try:
        return store.key_value_try_get(f"tanager/name/{host}")
    except jax.errors.JaxRuntimeError:
        return "unknown"


def _listen(store: Any) -> None:
    """End this process when another host says that it stops, or the chief is gone."""
    name = "unknown"
    while True:
        try:
            name = store.blocking_key_value_get("tanager/name/0", _PATIENCE)
            text = store.blocking_key_value_get(_FAILED, _PATIENCE)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                continue  # a run may take longer
            text = f"host 0 ({name}) is gone"
        _stop(text)
        return


def _stop(text: str) -> None:
    if not _leaving.is_set():
        _end(
            f"{text}; so this host stops. Run the same command again, with the run's "
            "folder as --out, to resume from the last checkpoint"
        )


def _end(text: str) -> NoReturn:
    print(f"tanager: {text}", file=sys.stderr, flush=True)
    _exit()


def _exit() -> NoReturn:
    if _me() == 0:
        # JAX aborts the other hosts when this one is gone: let them end before.
        time.sleep(5 * _BEAT)
    # The main thread may wait in a collective, which nothing interrupts.
    os._exit(1)


def count() -> int:
    """Return how many hosts take part; 1 where nothing was started."""
    return jax.process_count()


def is_chief() -> bool:
    """Return whether this is the host that writes the run's files."""
    return jax.process_index() == 0


def from_chief(function: Callable[[], Any]) -> Any:
    """Run a function on the chief, and return on every host what it returned.

    Args:
        function: returns what JSON can hold, and no secret: it is sent to all hosts.

    Raises:
        ValueError: the function raised it on the chief.
        OSError: likewise.
    """
    if count() == 1:
        return function()
    key = _next_word()
    if not is_chief():
        word = json.loads(_store().blocking_key_value_get(key, _PATIENCE))
        if "error" in word:
            kind = OSError if word["of_system"] else ValueError
            raise kind(f"host 0: {word['error']}")
        return word["value"]
    try:
        value = function()
    except (ValueError, OSError) as error:
        said = {"error": str(error), "of_system": isinstance(error, OSError)}
        _store().key_value_set(key, json.dumps(said))
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
    from_chief(lambda: made.append(function()))
    return made[0] if made else function()


def total(*numbers: int) -> tuple[int, ...]:
    """Return for each number its sum over all hosts: the same answer on all."""
    if count() == 1:
        return numbers
    return tuple(np.sum(_gathered(np.array(numbers, np.int32)), axis=0).tolist())


def require_same(what: str, fingerprint: str) -> None:
    """Refuse hosts that hold different things, named by `what`.

    Each sends the fingerprint of what it holds to all others.

    Raises:
        ValueError: on every host, naming those that differ from the chief.
    """
    if count() == 1:
        return
    everyone = _gathered(np.frombuffer(fingerprint.encode().ljust(64)[:64], np.uint8))
    odd = np.flatnonzero(np.any(everyone != everyone[0], axis=1))
    if odd.size:
        remedy = "all hosts must read the same files with the same command and version"
        others = f"on host {', '.join(map(str, odd))}"
        validate.refuse(what, others, "differs from what host 0 has", remedy)


def _gathered(mine: np.ndarray) -> np.ndarray:
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def _runtime() -> Any:
    # JAX's key-value store has no public name; orbax reaches it in this way too.
    # `jax.process_index` would look for devices, for which all hosts wait.
    from jax._src.distributed import global_state

    return global_state


def _store() -> Any:
    return _runtime().client


def _me() -> int:
    return _runtime().process_id


def _next_word() -> str:
    global _words
    _words += 1
    return f"tanager/word/{_words}"
