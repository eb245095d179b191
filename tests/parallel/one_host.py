"""One host of a small run on several, started by `test_many_hosts`."""

import json
import os
import signal
import sys
import threading
from pathlib import Path


os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
)
os.environ["JAX_PLATFORMS"] = "cpu"

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quick  # noqa: F401

from parts import train
from softmax import examples, loss, predict
from tanager.data import UnreadableExample
from tanager.parallel import hosts
from tanager.privacy.account import Account
from tanager.privacy.class_counts import release_of
from tanager.privacy.mechanism import Mechanism
from tanager.training.class_weights import balanced
from tanager.training.evaluate import Classification
from tanager.training.problem import Problem


FEATURES, CLASSES, STEPS = 8, 4, 12


class Rows:
    """A source that is read example by example, not held on the devices."""

    def __init__(self, arrays, bad=()):
        self.arrays, self.bad = arrays, bad

    def __len__(self):
        return len(self.arrays["label"])

    def __getitem__(self, index):
        if index in self.bad:
            raise UnreadableExample(f"example {index} is torn", int(index))
        return {name: values[index] for name, values in self.arrays.items()}


def main(settings):
    """Train; `settings` say who this is and what shall happen to it."""
    me = settings["host"]
    test = Classification(predict, examples(30, CLASSES, FEATURES, 1), tuple("abcd"))
    calls = []

    def evaluate(params):
        calls.append(1)
        if settings.get("victim") == me and len(calls) == 4:
            os.kill(os.getpid(), getattr(signal, settings["signal"]))
        if settings.get("fails") == me and len(calls) == 4:
            raise ValueError("the disk of this host is on fire")
        return test(params.model if settings.get("balanced") else params)

    seed = settings.get("data", {}).get(str(me), 0)
    own = settings.get("own", {}).get(str(me), {})
    data = examples(60, CLASSES, FEATURES, seed)
    params = {"w": jnp.zeros((CLASSES, FEATURES)), "b": jnp.zeros(CLASSES)}
    rows = Rows(data, settings.get("bad", ()))
    problem = Problem(loss, params, data if settings.get("held", True) else rows)
    release = None
    if settings.get("balanced"):
        problem = balanced(problem, lambda: data["label"], CLASSES)
        release = release_of(2.0, 1e-3, len(data["label"]), CLASSES, "zero-out")
    result = train(
        **vars(problem)
        | {
            "account": Account(Path(settings["out"]).parent / "account"),
            "unreadable": "skip" if settings.get("bad") else "error",
        },
        class_counts=release,
        mechanism=Mechanism(
            own.get("sample_rate", settings.get("sample_rate", 0.4)),
            own.get("noise_multiplier", 1.2),
            STEPS,
        ),
        **{"clip_norm": own["clip_norm"]} if "clip_norm" in own else {},
        optimizer=optax.sgd(2.0, momentum=0.5),
        out=settings["out"],
        physical_batch_size=16 * settings["hosts"],  # 8 rows on each device
        shard_parameters=settings.get("shard", False),
        evaluate=evaluate,
        evaluate_every=4,
        checkpoint_seconds=settings.get("checkpoint_seconds", 1e6),
        seed=3,
    )
    flat = [np.ravel(leaf) for leaf in jax.tree.leaves(result.params)]
    np.save(f"{settings['out']}-{me}.npy", np.concatenate(flat))
    print(json.dumps({"epsilon": result.epsilon, "devices": jax.device_count()}))


def one_after_the_other(asked):
    """Start every run; say of one that is to be refused what was wrong."""
    for changes in asked["runs"]:
        try:
            main(asked | changes)
        except ValueError as error:
            if not changes.get("refused"):
                raise
            print("refused:", error)


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text()) | {"host": int(sys.argv[2])}
    if asked["hosts"] == 1:
        one_after_the_other(asked)
    else:
        hosts.SILENCE = asked.get("silence", hosts.SILENCE)
        hosts._BEAT = asked.get("beat", 0.4)  # a host that fails waits for five of them
        with hosts.together(
            f"127.0.0.1:{asked['port']}",
            asked["hosts"],
            asked["host"],
            timeout=asked.get("timeout", 60),
        ):
            one_after_the_other(asked)
        # Python ends threads that are left in C++ at its exit, and C++ then aborts.
        left = {thread for thread in threading.enumerate() if thread.daemon}
        assert not left, left
