"""Stop between two pieces of work when asked to, losing nothing."""

import signal
import threading
from typing import Self


class Interrupt:
    """True once Ctrl-C or a termination signal has arrived inside its `with` block.

    The loss of the terminal (SIGHUP) counts, where nobody asked that it should not.
    A second Ctrl-C stops at once; the run can still be resumed. Signals can only be
    taken over in the main thread; elsewhere this never becomes true.
    """

    def __init__(self):
        self._arrived = False
        self._before = {}

    def __bool__(self) -> bool:
        return self._arrived

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            names = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
                names.append(signal.SIGHUP)
            for name in names:
                self._before[name] = signal.signal(name, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _note(self, number: int, frame: object) -> None:
        if self._arrived:
            raise KeyboardInterrupt
        self._arrived = True
