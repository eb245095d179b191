"""Ctrl-C is not lost, whoever swallows it; and handlers stay whose they are."""

import contextlib
import os
import signal

import pytest

from tanager.training.interrupt import Interrupt, noting


@pytest.fixture(autouse=True)
def _as_python_begins():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_that_was_swallowed_stops_the_next_training():
    with noting():
        assert not Interrupt()
        with contextlib.suppress(KeyboardInterrupt):
            press()
        with Interrupt() as interrupt:
            assert interrupt
            with pytest.raises(KeyboardInterrupt):
                press()
    assert not Interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_noted_at_first_and_raised_the_second_time():
    with Interrupt() as interrupt:
        assert not interrupt
        press()
        assert interrupt
        with pytest.raises(KeyboardInterrupt):
            press()
    assert interrupt
    assert not Interrupt()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_another_handler_is_left_alone(handler):
    signal.signal(signal.SIGINT, handler)
    with noting():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler
