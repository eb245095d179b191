"""Trains on 1, 2, 4 and 8 devices of this process, and prints what came out as JSON.

Run by `test_many_devices`, as the number of virtual devices is fixed when JAX starts.
"""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path


os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

from parts import step as make_step
from parts import train
from tanager.bench.collectives import exchanged
from tanager.data import ArraySource, gather
from tanager.parallel.layout import Layout
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed
from tanager.training.evaluate import Classification


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

N, FEATURES, HIDDEN, CLASSES, STEPS = 96, 16, 24, 4, 20
MECHANISM = Mechanism(sample_rate=0.4, noise_multiplier=1.2, steps=STEPS)
C, RATE = 0.7, 0.5
# One update for every number of devices, whole and in shares: `the_same_bits`.
GRID = [(1, 8, False), (2, 8, False), (8, 64, False), (4, 16, True), (8, 8, True)]
EVALUATED = [(4, 16), (8, 64)]


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
        "evaluate": Classification(predict, examples(33, 1), tuple("abcd")),
        "strategy": "bk_mixopt",
        "progress": False,
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


def accuracy(result):
    assert result.evaluation is not None
    return result.evaluation.accuracy


def flat(tree):
    leaves = jax.tree.leaves(jax.device_get(tree))
    return np.concatenate([np.ravel(leaf) for leaf in leaves])


def apart(one, other):
    return float(np.max(np.abs(flat(one) - flat(other))))


def equality():
    reference = trained(1, 64)
    rows = []
    last = None
    for devices, physical, shard in GRID:
        changes = {} if (devices, physical) in EVALUATED else {"evaluate": None}
        result = trained(devices, physical, shard, **changes)
        row = {
            "devices": devices,
            "physical_batch_size": physical,
            "shard_parameters": shard,
            "difference": apart(result.params, reference.params),
            "average": apart(result.average, reference.average),
        }
        if not changes:
            row["accuracy"] = accuracy(result)
        rows.append(row)
        last = result.params
    return {
        "rows": rows,
        "again": apart(trained(1, 64, evaluate=None).params, reference.params),
        "on_eight_again": apart(trained(*GRID[-1], evaluate=None).params, last),
        "moved": apart(reference.params, params()),
        "accuracy": accuracy(reference),
    }


class EveryDeviceItsOwnNoise(Layout):
    """Algorithm 1 without the shared noise: n devices add n independent noises."""

    def reduce(self, tree, like):
        total = super().reduce(tree, like)
        keys = jax.random.split(jax.random.key(5), self.count)
        return jax.tree.map(
            lambda leaf: (
                leaf + sum(jax.random.randint(k, leaf.shape, -99, 99) for k in keys)
            ),
            total,
        )


class MeanOfDevices(Layout):
    def reduce(self, tree, like):
        return jax.tree.map(lambda leaf: leaf // self.count, super().reduce(tree, like))


class OneDeviceOnly(Layout):
    def reduce(self, tree, like):
        mine = jax.tree.map(lambda leaf: jnp.zeros_like(leaf).at[0].set(leaf[0]), tree)
        return super().reduce(mine, like)


def step_of(layout, mechanism=MECHANISM):
    return make_step(
        loss=loss,
        params=params(),
        optimizer=optax.sgd(RATE),
        mechanism=mechanism,
        examples=N,
        seed=Seed.from_int(3),
        clip_norm=C,
        strategy="bk_mixopt",
        ema_decay=0.9,
        layout=layout,
    )


def one_update(layout, physical=16, number=0):
    """The state after one update, and the counts."""
    step, source = step_of(layout), ArraySource(examples())
    state = step.start(params())
    total, key = step.zero(state.params), step.augmentation_key(number)
    for part in step.sampler.batches(number, physical):
        batch = layout.rows(part._replace(examples=gather(source, part.indices)))
        total = step.accumulate(state.params, total, batch, key)
    return step.apply(state, total, step.draw(number), np.int32(number))[:2]


def lemma(layout):
    """How far an update is from equation (5) of Lemma A.1, computed in float64."""
    step = step_of(layout)
    indices = step.sampler.indices(0)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params())
        total = np.zeros(flat(wide).size)
        for index in indices:
            one = ArraySource(examples())[index]
            one = {**one, "x": one["x"].astype(np.float64)}
            gradient = flat(jax.grad(loss)(wide, one))
            total += gradient * min(1, C / np.linalg.norm(gradient)) / C
    hide = step.noise
    assert hide is not None
    noise = flat(hide(hide.grid.zeros(params()), 0)) / C
    expected = flat(params()) - RATE * (total + noise) / (MECHANISM.sample_rate * N)
    state, counts = one_update(layout)
    assert int(counts.examples) == len(indices)
    return float(np.max(np.abs(flat(state.params) - expected)))


def collectives(layout, physical=16):
    """What devices exchange in the two compiled functions, and what they hold."""
    step = step_of(layout)
    state = step.start(params())
    rows = gather(ArraySource(examples()), np.arange(physical))
    batch = layout.rows(
        PhysicalBatch(
            rows, np.ones(physical, bool), np.arange(physical, dtype=np.int32)
        )
    )
    accumulate, update = (low.compile() for low in step.lowered(state, batch))
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
    wide = {"up": np.zeros((256, 1024), np.float32), "down": np.zeros((1024, 256))}
    wide["down"] = wide["down"].astype(np.float32)

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
    batch = PhysicalBatch(wide_rows, np.ones(rows, bool), np.zeros(rows, np.int32))
    state = step.start(wide)
    accumulate, update = (low.compile() for low in step.lowered(state, batch))
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


def bits(layout, each=4, backwards=False):
    """The parameters after one update, as bytes, whatever lies between."""
    step, source = step_of(layout), ArraySource(examples())
    state = step.start(params())
    total, key = step.zero(state.params), step.augmentation_key(0)
    parts = list(step.sampler.batches(0, each * layout.count))
    for part in reversed(parts) if backwards else parts:
        batch = layout.rows(part._replace(examples=gather(source, part.indices)))
        total = step.accumulate(state.params, total, batch, key)
    state, counts, checksum = step.apply(state, total, step.draw(0), np.int32(0))
    del counts
    return flat(state.params).tobytes().hex(), np.asarray(checksum).tolist()


def the_same_bits():
    """As many different results as there are, over devices, shares and orders."""
    layouts = [Layout(n, share) for n in (1, 2, 3, 4, 8) for share in (False, True)]
    made = [bits(layout, backwards=way) for layout in layouts for way in (False, True)]
    return {
        "tried": len(made),
        "results": len({parameters for parameters, _ in made}),
        "checksums": len({tuple(checksum) for _, checksum in made}),
        "of_other_rows": bits(Layout(2), each=3)[1] != made[0][1],
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


def main(folder):
    parameters = flat(params()).size
    reference = one_update(Layout(1))[0].params
    planted = {
        kind.__name__: apart(one_update(kind(4))[0].params, reference)
        for kind in (EveryDeviceItsOwnNoise, MeanOfDevices, OneDeviceOnly)
    }
    # Resumed on other devices: the same stream of batches, views and noise.
    several = Path(folder) / "several"
    stopped = interrupted(several, 8, 16)
    resumed = trained(2, 8, out=several, evaluate_every=5, checkpoint_seconds=0.0)
    found = {
        "parameters": parameters,
        "equality": equality(),
        "bits": the_same_bits(),
        "planted": planted,
        "unplanted": apart(one_update(Layout(4))[0].params, reference),
        "lemma": {n: lemma(Layout(n)) for n in (1, 4, 8)},
        "lemma_shared": lemma(Layout(8, shard_parameters=True)),
        "whole": collectives(Layout(8)),
        "shares": collectives(Layout(8, shard_parameters=True)),
        "wide": {name: wide_memory(name) for name in ("auto", "bk", "bk_mixopt")},
        "wide_whole": wide_memory("bk", shard=False),
        "stopped": stopped,
        "resumed": apart(resumed.params, trained(1, 64, evaluate=None).params),
        "resumed_steps": resumed.summary["steps"],
    }
    print(json.dumps(found))


def interrupted(out, devices, physical):
    """Train until Ctrl-C after the second evaluation; return the steps charged."""
    calls = []

    def evaluate(model):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return Classification(predict, examples(33, 1), tuple("abcd"))(model)

    with contextlib.suppress(KeyboardInterrupt):
        trained(
            devices,
            physical,
            out=out,
            evaluate=evaluate,
            evaluate_every=5,
            checkpoint_seconds=0.0,
        )
    return len((out / "ledger.jsonl").read_text().splitlines())


if __name__ == "__main__":
    main(sys.argv[1])
