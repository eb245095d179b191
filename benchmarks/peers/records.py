"""What a record of `run.py` says, for tables and figures."""

import math
from typing import Any

import numpy as np


NAMES = {
    "torch-sgd": "PyTorch, SGD",
    "torch-sgd:nhwc": "PyTorch, SGD, channels last",
    "jax-sgd": "JAX, SGD",
    "jax-sgd:options": "JAX, SGD, tanager's options",
    "tanager:auto": "**tanager**",
    "tanager:auto:low": "**tanager**, low memory",
    "opacus:hooks": "Opacus",
    "opacus:hooks:nhwc": "Opacus, channels last",
    "opacus:ghost": "Opacus, ghost",
    "opacus:functorch": "Opacus, functorch",
    "jax-privacy": "JAX-Privacy",
    "jax-privacy:options": "JAX-Privacy, tanager's options",
    "jax-privacy:8": "JAX-Privacy, microbatches of 8",
    "jax-vmap": "JAX, vmap by hand",
    "jax-vmap:options": "JAX, vmap by hand, tanager's options",
    "private-vision:ghost": "private_vision, ghost",
    "private-vision:mixed": "private_vision, mixed",
    "fastdp:MixOpt": "FastDP, MixOpt",
}
MODELS = {
    "wrn-16-4": "WRN-16-4 with weight standardisation, 32 × 32",
    "wrn-16-4-plain": "WRN-16-4 without weight standardisation, 32 × 32",
    "vit-tiny-16": "ViT-Tiny/16, 224 × 224",
    "vit-base-16": "ViT-B/16, 224 × 224",
    "bit-50x1": "BiT-50x1, 224 × 224",
    "mlp": "MLP, two hidden layers of 1024, 3072 features",
    "linear": "linear head, 2048 features",
}
PUBLIC = ("torch-sgd", "jax-sgd")


def failed(row: dict[str, Any]) -> bool:
    """Return whether a system could not do it, or did something else."""
    return bool(row.get("error")) or not row.get("seconds")


def rate(work: dict[str, Any], system: str) -> float | None:
    """Return the examples per second of a system; None if it failed or is not there."""
    for row in work["rows"]:
        if row["system"] == system and not failed(row):
            return work["physical_batch"] / float(np.median(row["seconds"]))
    return None


def systems(works: list[dict[str, Any]]) -> list[str]:
    """Return the systems that were tried, in the order of `NAMES`."""
    present = {row["system"] for work in works for row in work["rows"]}
    return [name for name in NAMES if name in present]


def columns(works: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one piece of work for each model, at the physical batch nearest to 32."""
    chosen = {}
    for work in sorted(works, key=_far, reverse=True):
        chosen[work["model"]] = work
    return [chosen[model] for model in MODELS if model in chosen]


def _far(work: dict[str, Any]) -> float:
    return abs(math.log2(work["physical_batch"] / 32))


def is_torch(system: str) -> bool:
    """Return whether a system runs on PyTorch."""
    return system.split(":")[0] in ("torch-sgd", "opacus", "fastdp", "private-vision")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits, as tables show it."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
