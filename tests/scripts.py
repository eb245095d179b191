"""Programs of the project that are not in its package, as modules to be tested."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


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
