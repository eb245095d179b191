"""A small process beside each host's training that notices when another host is gone.

A host that waits for another inside a collective waits for ever, and where the chief is
gone JAX ends the process with a stack trace. So the watching is done outside: the
watchers keep one connection each to the chief's watcher. When a training process ends
without a word, or a host falls silent, every watcher learns which one it was, tells its
own training process, and says so itself where that is no longer there.

It speaks lines of JSON: with the other watchers over TCP, with its own training
process over standard input and output.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn


BEAT = 2.0
"""Seconds between signs of life."""

_GRACE = 60.0  # seconds that the chief's watcher stays for the others to finish


class Peer:
    """A connection to another watcher, read by a thread of its own.

    Args:
        connection: open.
        events: where everything it says goes, as (peer, message), and its end.
        host: who is at the other end, if that is known.
    """

    def __init__(
        self, connection: socket.socket, events: queue.Queue, host: int | None
    ):
        connection.settimeout(None)
        self._connection = connection
        self._events = events
        self.host = host
        threading.Thread(target=self._read, daemon=True).start()

    def expect_life(self, silence: float) -> None:
        """From now on, take it for gone when it says nothing for so many seconds."""
        self._connection.settimeout(silence)

    def say(self, **message: Any) -> None:
        """Send a message; what cannot be sent will show in reading."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def _read(self) -> None:
        try:
            with self._connection.makefile() as lines:
                for line in lines:
                    message = json.loads(line)
                    if self.host is None and "host" in message:
                        self.host = message["host"]
                    self._events.put((self, message))
            reason = "its process ended"
        except TimeoutError:
            reason = "nothing was heard of it any more"
        except (OSError, ValueError):
            reason = "the connection to it broke"
        self._events.put((self, {"end": reason}))


class Watcher:
    """The watcher of one host; ends its process when there is nothing left to watch.

    Args:
        host: its number.
        hosts: how many there are.
        name: of this host, for people.
        address: (host, port) of the chief's watcher.
        timeout: seconds to wait for all hosts at the beginning.
        silence: seconds after which a host counts as gone.
    """

    def __init__(
        self,
        host: int,
        hosts: int,
        name: str,
        address: tuple[str, int],
        timeout: float,
        silence: float,
    ):
        self._host, self._hosts, self._name = host, hosts, name
        self._address, self._timeout, self._silence = address, timeout, silence
        self._events: queue.Queue = queue.Queue()
        self._peers: dict[int, Peer] = {}
        self._names = {host: name}
        self._finished: set[int] = set()
        self._orphan = False
        threading.Thread(target=self._hear_training, daemon=True).start()

    def run(self) -> NoReturn:
        """Call the roll, then watch until all have finished or one is gone."""
        if self._host == 0:
            self._call_roll()
        else:
            self._answer_roll()
        self._tell(ready=[self._names[number] for number in sorted(self._names)])
        threading.Thread(target=self._beat, daemon=True).start()
        for peer in self._peers.values():
            peer.expect_life(self._silence)
        while True:
            self._watch()

    def _call_roll(self) -> None:
        deadline = time.monotonic() + self._timeout
        try:
            server = socket.create_server(("", self._address[1]))
        except OSError as error:
            self._fail(f"port {self._address[1]} cannot be listened on: {error}")
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        for peer, message in self._until(deadline):
            if peer is None:
                self._own(message)
            elif "host" in message:
                self._admit(peer, message)
            if len(self._names) == self._hosts:
                break
        missing = sorted(set(range(self._hosts)) - set(self._names))
        if missing:
            self._fail(
                f"host {', '.join(map(str, missing))} of {self._hosts} did not come "
                f"within {self._timeout:g} s"
            )
        for peer in self._peers.values():
            peer.say(names=self._names)

    def _admit(self, peer: Peer, message: dict[str, Any]) -> None:
        number = message["host"]
        if message["hosts"] != self._hosts or number in self._names:
            twice = number in self._names
            problem = "came twice" if twice else f"expects {message['hosts']} hosts"
            text = f"host {number} ({message['name']}) {problem}"
            peer.say(lost=text)
            self._fail(text)
        self._names[number] = message["name"]
        self._peers[number] = peer

    def _answer_roll(self) -> None:
        deadline = time.monotonic() + self._timeout
        where = "{}:{}".format(*self._address)
        connection = None
        while connection is None:
            try:
                connection = socket.create_connection(self._address, timeout=BEAT)
            except OSError as error:
                if time.monotonic() > deadline:
                    self._fail(
                        f"host 0 does not answer at {where} for {self._timeout:g} s "
                        f"({error})"
                    )
                time.sleep(min(BEAT, self._timeout / 20))
        chief = Peer(connection, self._events, 0)
        chief.say(host=self._host, hosts=self._hosts, name=self._name)
        for peer, message in self._until(deadline + self._silence):
            if peer is None:
                self._own(message)
            elif "names" in message:
                self._names = {int(key): name for key, name in message["names"].items()}
                self._peers[0] = chief
                return
            elif "lost" in message:
                self._fail(message["lost"])
            elif "end" in message:
                self._fail(f"host 0 at {where} went away before all hosts had come")
        self._fail(f"host 0 at {where} waits for other hosts that do not come")

    def _watch(self) -> None:
        peer, message = self._events.get()
        if peer is None:
            self._own(message)
        elif "lost" in message:
            self._lose(message["lost"], but=peer.host)
        elif "finished" in message:
            self._finished.add(peer.host)
        elif "end" in message and peer.host in set(self._names) - self._finished:
            self._lose(f"{self._called(peer.host)} is gone: {message['end']}")
        if len(self._finished) == self._hosts:
            os._exit(0)

    def _own(self, message: dict[str, Any]) -> None:
        """Hear what this host's training process says."""
        me = self._called(self._host)
        if "finished" in message:
            self._finished.add(self._host)
            for peer in self._peers.values():
                peer.say(finished=True)
            if self._host:
                os._exit(0)
            threading.Timer(_GRACE, os._exit, (0,)).start()
        elif "failed" in message:
            self._say_all(lost=f"{me} stopped: {message['failed']}")
            os._exit(1)
        elif self._host not in self._finished:
            self._orphan = True
            self._explain_the_end()

    def _explain_the_end(self) -> NoReturn:
        """Say why this host's training ended; with the chief, JAX ends it too."""
        if self._host:
            for peer, message in self._until(time.monotonic() + BEAT / 2):
                if peer is not None and "lost" in message:
                    self._lose(message["lost"], but=0)
                elif peer is not None and "end" in message:
                    self._lose(f"{self._called(0)} is gone: {message['end']}")
        self._lose(f"{self._called(self._host)} is gone: its process ended")

    def _lose(self, text: str, but: int | None = None) -> NoReturn:
        self._tell(lost=text)
        self._say_all(but, lost=text)
        os._exit(1)

    def _fail(self, text: str) -> NoReturn:
        self._tell(failed=text)
        self._say_all(lost=text)
        os._exit(1)

    def _say_all(self, but: int | None = None, **message: Any) -> None:
        for number, peer in self._peers.items():
            if number != but:
                peer.say(**message)
        time.sleep(BEAT / 4)  # for what was said to leave before the process ends

    def _tell(self, **message: Any) -> None:
        """Tell the training process; where it is gone, the person watching."""
        if not self._orphan:
            try:
                print(json.dumps(message), flush=True)
                return
            except OSError:
                self._orphan = True
        if "lost" in message:
            print(stopping(message["lost"]), file=sys.stderr, flush=True)

    def _called(self, host: int) -> str:
        return f"host {host} ({self._names.get(host, 'unknown')})"

    def _until(self, deadline: float) -> Iterator[tuple[Peer | None, dict[str, Any]]]:
        while (left := deadline - time.monotonic()) > 0:
            try:
                yield self._events.get(timeout=left)
            except queue.Empty:
                return

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            Peer(connection, self._events, None)

    def _beat(self) -> None:
        while True:
            for peer in list(self._peers.values()):
                peer.say(alive=True)
            time.sleep(BEAT)

    def _hear_training(self) -> None:
        for line in sys.stdin:
            self._events.put((None, json.loads(line)))
        self._events.put((None, {"end": True}))


def stopping(text: str) -> str:
    """Return what a person is told when a host is lost."""
    return (
        f"tanager: {text}; so this host stops. Nothing is lost: the same command goes "
        "on from the last checkpoint"
    )


if __name__ == "__main__":
    # Ctrl-C and a termination signal are for the training process, not for this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    Watcher(**settings | {"address": tuple(settings["address"])}).run()
