"""Stop between two pieces of work when asked to, losing nothing."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn, Self


_noted = False


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Remember inside the `with` block, a command's, that Ctrl-C has arrived.

    It still raises `KeyboardInterrupt`. Some code swallows that, such as JAX's when
    garbage is collected. Then the next `Interrupt` is true, and no traceback is
    printed.
    """
    global _noted
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _remember)
    report = sys.unraisablehook

    def report_others(swallowed: "sys.UnraisableHookArgs") -> None:
        if not issubclass(swallowed.exc_type, KeyboardInterrupt):
            report(swallowed)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _noted = False


def _remember(number: int, frame: object) -> NoReturn:
    global _noted
    _noted = True
    raise KeyboardInterrupt


class Interrupt:
    """True once Ctrl-C or a termination signal has arrived inside its `with` block.

    Ctrl-C that `noting` remembers counts too, even after the block.
    The loss of the terminal (SIGHUP) counts, unless another handler is set for it.
    A second Ctrl-C stops at once; the run can still be resumed. Signals can only be
    taken over in the main thread; elsewhere this never becomes true.
    """

    def __init__(self):
        self._arrived = False
        self._before = {}

    def __bool__(self) -> bool:
        return self._arrived or _noted

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
        if self:
            raise KeyboardInterrupt
        self._arrived = True
