"""Problem, algorithm and runtime from one flat list of settings, for tests."""

import dataclasses
from typing import Any

import optax

import tanager
from tanager.training.step import Step


QUIET = {"delta": 1e-3, "optimizer": optax.sgd(0.1), "progress": False, "data": None}


def parts(settings) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return problem, algorithm, runtime, and the settings that are of none of them."""
    rest, made = QUIET | settings, []
    for kind in (tanager.Problem, tanager.DPSGD, tanager.Runtime):
        names = {field.name for field in dataclasses.fields(kind)} & rest.keys()
        made.append(kind(**{name: rest.pop(name) for name in names}))
    return *made, rest


def train(**settings):
    problem, algorithm, runtime, rest = parts(settings)
    return tanager.train(problem, algorithm, runtime, **rest)


def step(kind=Step, **settings):
    problem, algorithm, runtime, rest = parts({"strategy": "bk"} | settings)
    seed = rest.pop("seed", tanager.Seed.from_int(0))
    return kind(problem, algorithm, runtime, seed, **rest)
