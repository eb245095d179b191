"""Importing tanager changes no setting of the process."""

import subprocess
import sys


PROGRAM = """
import ast
import contextlib
import gc
import importlib
import logging
import os
import pathlib
import pkgutil
import signal
import sys
import threading
import warnings

import tanager

modules = [found.name for found in pkgutil.walk_packages(tanager.__path__, "tanager.")]
foreign = set()
for path in pathlib.Path(tanager.__file__).parent.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            foreign |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            foreign.add(node.module)
# What other libraries change when they are imported is not ours.
for name in sorted(foreign):
    if not name.startswith("tanager"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

import jax
import numpy as np


def settings():
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted(known))]
    return {
        "jax": dict(jax.config.values),
        "environment": dict(os.environ),
        "hooks": (
            sys.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            threading.excepthook,
            sys.gettrace(),
            list(gc.callbacks),
        ),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": (list(warnings.filters), warnings.showwarning),
        "logging": [
            (log.name, log.level, list(log.handlers), list(log.filters), log.propagate)
            for log in loggers
        ],
        "path": list(sys.path),
        "limits": (sys.getrecursionlimit(), gc.get_threshold(), gc.isenabled()),
        "numpy": (np.geterr(), np.get_printoptions()),
        "threads": threading.active_count(),
    }


known = set(logging.root.manager.loggerDict)
before = settings()
for name in modules:
    if not name.endswith("__main__"):
        importlib.import_module(name)
after = settings()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
import jax._src.xla_bridge as bridge
assert not bridge.backends_are_initialized(), "a module looked for devices"
print(len(modules))
"""


def test_importing_every_module_changes_no_setting():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) > 100
