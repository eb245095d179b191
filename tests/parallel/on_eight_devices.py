"""Trains on 1 to 8 devices of this process, and prints what came out as JSON.

Run by `test_many_devices`, see `scripts.on_devices`.
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quick  # noqa: F401

from parts import step as make_step
from parts import train
from switch import FULL
from tanager.adaptive import AdaptiveClipping
from tanager.bench.scaling import exchanged
from tanager.data import ArraySource, gather
from tanager.parallel.layout import Layout
from tanager.privacy.mechanism import Mechanism
from tanager.seed import Seed
from tanager.training.evaluate import Classification


N, FEATURES, HIDDEN, CLASSES, STEPS = 96, 16, 24, 4, 10
MECHANISM = Mechanism(sample_rate=0.4, noise_multiplier=1.2, steps=STEPS)
C, RATE = 0.7, 0.5
WIDE = ["auto", "bk", *["bk_mixopt"] * FULL]


def examples(rows=N, seed=0):
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, rows).astype(np.int32)
    x = np.eye(CLASSES, FEATURES)[labels] + 0.3 * draw.normal(size=(rows, FEATURES))
    return {"x": x.astype(np.float32), "label": labels}


def params():
    draw = np.random.default_rng(1)
    one = 0.3 * draw.normal(size=(FEATURES, HIDDEN))
    two = 0.3 * draw.normal(size=(HIDDEN, CLASSES))
    return {
        "one": jnp.asarray(one, jnp.float32),
        "bias": jnp.zeros(HIDDEN),
        "two": jnp.asarray(two, jnp.float32),
        "last": jnp.zeros(CLASSES),
    }


def predict(params, example):
    hidden = jnp.tanh(example["x"] @ params["one"] + params["bias"])
    return hidden @ params["two"] + params["last"]


def loss(params, example):
    return optax.softmax_cross_entropy_with_integer_labels(
        predict(params, example), example["label"]
    )


def augment(key, example):
    return {**example, "x": example["x"] + 0.1 * jax.random.normal(key, (FEATURES,))}


def trained(devices, physical, shard=False, **changes):
    settings = {
        "delta": 1e-3,
        "optimizer": optax.sgd(RATE, momentum=0.5),
        "clip_norm": C,
        "seed": 3,
        "augment": augment,
        "augmentation_multiplicity": 2,
        "strategy": "bk_mixopt",
        "progress": False,
        "adaptive": AdaptiveClipping(),
    }
    return train(
        loss=loss,
        params=params(),
        data=examples(),
        mechanism=MECHANISM,
        devices=devices,
        physical_batch_size=physical,
        shard_parameters=shard,
        **settings | changes,
    )


def flat(tree):
    leaves = jax.tree.leaves(jax.device_get(tree))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def apart(one, other):
    return float(np.max(np.abs(flat(one) - flat(other))))


def equality():
    """Runs with clipping norms that the noisy counts of all devices move."""
    evaluate, last = Classification(predict, examples(33, 1), tuple("abcd")), []

    def interrupting(model):
        last.append(model)
        if len(last) == 11:  # one before the first step, and two after each
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(model)

    reference, expected = followed(1, 64, evaluate=evaluate)
    # Stopped, and resumed on other devices: the same batches, views and noise.
    out = Path(sys.argv[1]) / "several"
    _, lines = followed(8, 8, True, out=out, evaluate=interrupting)
    stopped = len((out / "ledger.jsonl").read_text().splitlines())
    resumed, more = followed(2, 64, out=out, evaluate=evaluate)
    assert reference is not None and resumed is not None
    return {
        "difference": apart(resumed.params, reference.params),
        "average": apart(resumed.average, reference.average),
        "moved": apart(reference.params, params()),
        "stopped": stopped,
        "steps": resumed.summary["steps"],
        "lines": [*lines, *more],
        "expected": expected,
    }


def followed(*place, **changes):
    """A run, or None if it is stopped; clipping norm and accuracy after each step."""
    lines, result = [], None
    with contextlib.suppress(KeyboardInterrupt):
        result = trained(*place, evaluate_every=1, on_metrics=lines.append, **changes)
    return result, [[line["clip_norm"], line["test_accuracy"]] for line in lines]


class EveryDeviceItsOwnNoise(Layout):
    """Algorithm 1 without the shared noise: n devices add n independent noises."""

    def reduce(self, tree, like):
        def noisy(leaf):
            key, shape = jax.random.key(5), (self.count, *leaf.shape)
            return leaf + jnp.sum(jax.random.randint(key, shape, -99, 99), axis=0)

        return jax.tree.map(noisy, super().reduce(tree, like))


class MeanOfDevices(Layout):
    def reduce(self, tree, like):
        return jax.tree.map(lambda leaf: leaf // self.count, super().reduce(tree, like))


class OneDeviceOnly(Layout):
    def reduce(self, tree, like):
        mine = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[0].set(leaf[0]), tree)
        return super().reduce(mine, like)


def step_of(layout):
    """Return the step of a layout like this one, made once: programs are then too."""
    return _step_of(type(layout), layout.count, layout.shard_parameters)


@functools.cache
def _step_of(kind, count, shard):
    return make_step(
        loss=loss,
        params=params(),
        optimizer=optax.sgd(RATE),
        mechanism=MECHANISM,
        examples=N,
        seed=Seed.from_int(3),
        clip_norm=C,
        strategy="bk_mixopt",
        ema_decay=0.9,
        layout=kind(count, shard_parameters=shard),
    )


def one_update(layout, physical=16, turn=1):
    """The state after one update, the counts, and the checksum."""
    step, source = step_of(layout), ArraySource(examples())
    state = step.start(params())
    total, key = step.zero(), step.augmentation_key(0)
    for part in list(step.sampler.batches(0, physical))[::turn]:
        batch = layout.rows(part._replace(examples=gather(source, part.indices)))
        total = step.accumulate(state.params, total, batch, key)
    return step.apply(state, total, step.draw(0), np.int32(0))


def lemma():
    """How far updates are from equation (5) of Lemma A.1, computed in float64."""
    step = step_of(Layout(1))
    indices = step.sampler.indices(0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params())
        rows = gather(ArraySource(examples()), indices)
        rows = {**rows, "x": rows["x"].astype(np.float64)}
        found = jax.vmap(jax.grad(loss), (None, 0))(wide, rows)
        leaves = [leaf.reshape(len(indices), -1) for leaf in jax.tree.leaves(found)]
    gradients = np.concatenate(leaves, axis=1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    total = np.sum(gradients * np.minimum(1, C / norms), axis=0) / C
    hide = step.noise
    assert hide is not None
    noise = flat(hide(hide.grid.zeros(params()), 0)) / C
    expected = flat(params()) - RATE * (total + noise) / (MECHANISM.sample_rate * N)
    apart = []
    for layout in (Layout(1), Layout(8, shard_parameters=True)):
        state, counts, _ = one_update(layout)
        assert int(counts.examples) == len(indices)
        apart.append(float(np.max(np.abs(flat(state.params) - expected))))
    return apart


def collectives(layout, physical=16):
    """What devices exchange in the two compiled functions, and what they hold."""
    step = step_of(layout)
    state = step.start(params())
    rows = gather(ArraySource(examples()), np.arange(physical))
    accumulate, update = (low.compile() for low in step.lowered(rows, physical))
    return {
        "accumulate": exchanged(accumulate.as_text() or ""),
        "update": exchanged(update.as_text() or ""),
        "state_here": sum(
            leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state)
        ),
        "state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "replicas_agree": replicas_agree(one_update(layout)[0].params),
    }


def wide_memory(strategy, shard=True):
    """Temporary bytes of a device, for a model much larger than its activations."""
    wide = {"up": np.zeros((256, 1024), np.float32)}
    wide["down"] = np.zeros((1024, 256), np.float32)

    def loss(params, example):
        return jnp.sum(jnp.tanh(example["x"] @ params["up"]) @ params["down"])

    step = make_step(
        loss=loss,
        params=wide,
        optimizer=optax.sgd(RATE),
        mechanism=MECHANISM,
        examples=N,
        seed=Seed.from_int(3),
        clip_norm=C,
        strategy=strategy,
        ema_decay=0.9,
        layout=Layout(8, shard_parameters=shard),
    )
    rows = 8 * 32
    wide_rows = {"x": np.zeros((rows, 256), np.float32)}
    accumulate, update = (low.compile() for low in step.lowered(wide_rows, rows))
    sizes = re.findall(r"(?:f32|u32|u64)\[([\d,]+)\]", update.as_text() or "")
    compiled, largest = accumulate, max(int(np.prod(eval(size))) for size in sizes)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "temporary": memory.temp_size_in_bytes,
        "model": sum(leaf.nbytes for leaf in wide.values()),
        "rows_each": rows // 8,
        "largest_in_update": largest,
        "share": max(leaf.size for leaf in wide.values()) // 8,
    }


def bits(layout, each=2):
    """The parameters after one update, and the checksum, for each order of batches."""
    for turn in (1, -1):
        state, _, checksum = one_update(layout, each * layout.count, turn)
        yield flat(state.params).tobytes().hex(), tuple(np.asarray(checksum).tolist())


def numbers(found):
    return np.frombuffer(bytes.fromhex(found[0]), np.float32)


def the_same_bits():
    """As many different results as there are, over devices, shares and orders."""
    tried = [(1, False), (3, False), (8, False), (8, True)]
    made = [found for one in tried for found in bits(Layout(*one))]
    whole, shares = made[:-2], made[-2:]
    apart = [
        np.subtract(*map(numbers, pair)) for pair in zip(whole, shares, strict=False)
    ]
    (_, other), _ = bits(Layout(1), each=16)
    return {
        "tried": len(made),
        "results": len({parameters for parameters, _ in whole}),
        "of_shares": float(np.abs(apart).max()),
        "checksums": len({checksum for _, checksum in made}),
        "of_other_rows": other != made[0][1],
    }


def replicas_agree(tree):
    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            key = str(shard.index)
            value = np.asarray(shard.data)
            if not np.array_equal(seen.setdefault(key, value), value):
                return False
    return True


def main():
    reference = one_update(Layout(1))[0].params
    planted = {
        kind.__name__: apart(one_update(kind(8))[0].params, reference)
        for kind in (EveryDeviceItsOwnNoise, MeanOfDevices, OneDeviceOnly)
    }
    found = {
        "parameters": flat(params()).size,
        "equality": equality(),
        "bits": the_same_bits(),
        "planted": planted,
        "lemma": lemma(),
        "whole": collectives(Layout(8)),
        "shares": collectives(Layout(8, shard_parameters=True)),
        "wide": {name: wide_memory(name) for name in WIDE},
        "wide_whole": wide_memory("bk", shard=False),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
