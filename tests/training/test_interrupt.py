"""Ctrl-C is not lost, whoever swallows it; and handlers stay whose they are."""

import contextlib
import os
import signal
import subprocess
import sys

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


def test_ctrl_c_that_was_swallowed_is_not_printed(monkeypatch):
    class Collected:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    with noting():
        Collected(KeyboardInterrupt())
        assert not printed
        Collected(ValueError())
    assert [each.exc_type for each in printed] == [ValueError]
    Collected(KeyboardInterrupt())
    assert len(printed) == 2


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_another_handler_is_left_alone(handler):
    signal.signal(signal.SIGINT, handler)
    with noting():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


LONG = """
import importlib, os, signal, threading
import jax, jax.numpy as jnp
from tanager import cli

def run(words):
    x = jnp.ones((8, 8))
    long = lambda x: [x := jnp.sin(x @ x + n) for n in range(2000)][-1]
    lowered = jax.jit(long).lower(x)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    lowered.compile()

importlib.import_module("tanager.commands.plan").run = run
cli.sys.argv = ["tanager", "plan"]
cli.process()
"""


def test_ctrl_c_in_a_compilation_ends_the_command_and_nothing_crashes():
    """JAX compiles in a thread, which outlives what it needs as Python ends."""
    done = subprocess.run(
        [sys.executable, "-c", LONG],
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "tanager: stopped\n")
