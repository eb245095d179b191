"""Where and with what a measurement was made."""

import os
import platform
from importlib import metadata
from typing import Any

import jax

import tanager
from tanager import _processor


def machine() -> dict[str, Any]:
    """Return processor, cores, platform and JAX's devices.

    `cores` are those this process may use; `cores_installed` all there are.
    """
    device = jax.devices()[0]
    return {
        "cpu": _processor.name(),
        "cores": _processor.cores(),
        "cores_installed": os.cpu_count(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "devices": jax.device_count(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, JAX, its compiler and tanager."""
    return {
        "python": platform.python_version(),
        "jax": metadata.version("jax"),
        "jaxlib": metadata.version("jaxlib"),
        "tanager": tanager.__version__,
    }
