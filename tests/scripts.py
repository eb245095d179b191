"""Programs of the project that are not in its package: imported, or run."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from forks import Fork


ROOT = Path(__file__).parent.parent


def load(path: str) -> ModuleType:
    """Import a script by its path in the project; modules beside it, it may import."""
    if (folder := str((ROOT / path).parent)) not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_devices(count: int, script: str, *words: Any, **environment: str) -> Any:
    """Run a script of tests/parallel on virtual devices; return the JSON it printed.

    Their number is fixed when JAX starts, so it takes a process of its own.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    own = {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
    }
    path = Path(__file__).parent / "parallel" / script
    done = Fork(path, words, environment=os.environ | own | environment, strict=True)
    done.wait()
    assert done.code == 0, done.errors[-3000:]
    return json.loads(done.out.splitlines()[-1])
