"""JAX without privacy, tanager, vmap by hand and JAX-Privacy, one system a process.

All of them are given the same model and the same loss of one example. With ":options"
the others are compiled with the options that tanager asks of XLA, and run where glibc
keeps what they free; else as JAX comes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import protocol
from jax import monitoring

from tanager import models
from tanager._heap import keep_freed_memory, run_in_place
from tanager.compiling import compiler_options
from tanager.models.small import MLP
from tanager.models.wide_resnet import WideResNet
from tanager.training.precision import PRECISIONS


def create(model, classes, shape):
    """Return the model; strided windows are centred as PyTorch has them."""
    key = jax.random.key(0)
    if model in ("wrn-16-4", "wrn-16-4-plain"):
        standardised = model == "wrn-16-4"
        return WideResNet(
            16,
            4,
            classes,
            padding="SYMMETRIC",
            weight_standardisation=standardised,
            key=key,
        )
    hidden = {"mlp": (1024, 1024), "mlp-small": (64,), "linear": ()}
    if model in hidden:
        return MLP(classes, tuple(shape), hidden=hidden[model], key=key)
    return models.create(model, classes=classes, image_shape=tuple(shape), key=key)


def named(params):
    """Return a model's arrays by the names of its attributes."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path).lstrip(".").replace("[", ".").replace("]", ""): leaf
        for path, leaf in found
    }


def loss(params, example):
    """Return the loss of one example."""
    logits = params(example["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["y"])


class JaxWorker(protocol.Worker):
    """SGD; the base of the private ones, which differ in `clipped` alone."""

    def __init__(self, system, work):
        super().__init__(system, work)
        self.work = work
        self.compiled = 0
        self.expected_batch, self.learning_rate = self.rows, 0.1
        self.noise_multiplier = 1.0
        monitoring.register_event_duration_secs_listener(self._count)

    def compute_in(self, precision):
        jax.config.update("jax_default_matmul_precision", PRECISIONS[precision])

    def precision(self):
        return {PRECISIONS[name]: name for name in ("float32", "tf32")}[
            str(jax.config.jax_default_matmul_precision)  # pyrefly: ignore[missing-attribute]
        ]

    def _count(self, event, duration_secs, **more):
        del duration_secs, more
        self.compiled += event == "/jax/core/compile/backend_compile_duration"

    def build(self):
        model = create(self.work["model"], self.work["classes"], self.images.shape[1:])
        names = list(named(model))
        leaves, structure = jax.tree.flatten(model)
        assert len(leaves) == len(names)
        values = [jnp.array(self.initial[name]) for name in names]
        self.names = names
        self.params = jax.tree.unflatten(structure, values)
        self.batch = self._batch(self.images[: self.rows], self.labels[: self.rows])
        self.everyone = jnp.ones(self.rows, bool)
        self.total = self._zeros()
        self.key = jax.random.key(1)
        self.prepare_clipping()
        self.accumulate = self.jit(self._accumulate, donate_argnums=1)
        self.update = self.jit(self._update)

    def jit(self, function, **more):
        """Compile as this system's users do."""
        options = compiler_options() if self.system.endswith(":options") else {}
        return jax.jit(function, compiler_options=options, **more)

    def _batch(self, images, labels):
        return {"x": jnp.asarray(images), "y": jnp.asarray(labels, jnp.int32)}

    def _zeros(self):
        return jax.tree.map(jnp.zeros_like, self.params)

    def prepare_clipping(self):
        """Do what is done once, ahead of compiling."""

    def clipped(self, params, batch, mask):
        """Return the sum of a physical batch's (clipped) gradients."""

        def total(params):
            losses = jax.vmap(loss, (None, 0))(params, batch)
            return jnp.where(mask, losses, 0).sum()

        return jax.grad(total)(params)

    def _accumulate(self, params, total, batch, mask):
        return jax.tree.map(jnp.add, total, self.clipped(params, batch, mask))

    def _update(self, params, total, key, deviation, factor):
        leaves, structure = jax.tree.flatten(total)
        keys = jax.random.split(key, len(leaves))
        noisy = [
            leaf + deviation * jax.random.normal(key, leaf.shape, leaf.dtype)
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        noisy = jax.tree.unflatten(structure, noisy)
        return jax.tree.map(lambda p, g: p - factor * g, params, noisy)

    def losses(self):
        batch = jax.tree.map(lambda leaf: leaf[:8], self.batch)
        return np.asarray(jax.vmap(loss, (None, 0))(self.params, batch))

    def step(self):
        self.total = self.accumulate(self.params, self.total, self.batch, self.everyone)
        jax.block_until_ready(self.total)

    def logical(self, images, labels):
        total = self._zeros()
        for start in range(0, len(images), self.rows):
            part = slice(start, start + self.rows)
            batch, mask = self._padded(images[part], labels[part], self.rows)
            total = self.accumulate(self.params, total, batch, mask)
        self._finish(total)

    def _padded(self, images, labels, rows):
        more = rows - len(images)
        images = np.pad(images, [(0, more)] + [(0, 0)] * (images.ndim - 1))
        mask = np.arange(rows) < len(labels)
        return self._batch(images, np.pad(labels, (0, more))), jnp.asarray(mask)

    def _finish(self, total):
        self.key, key = jax.random.split(self.key)
        deviation = jnp.float32(self.noise_multiplier * self.clip_norm)
        factor = jnp.float32(self.learning_rate / self.expected_batch)
        self.params = self.update(self.params, total, key, deviation, factor)
        jax.block_until_ready(self.params)

    def clipped_sum(self):
        total = self.accumulate(self.params, self._zeros(), self.batch, self.everyone)
        return {name: np.asarray(leaf) for name, leaf in named(total).items()}

    def parameters(self):
        return {name: np.asarray(leaf) for name, leaf in named(self.params).items()}

    def logits(self, images):
        return np.asarray(jax.vmap(self.params)(jnp.asarray(images)))

    def compilations(self):
        return self.compiled

    def device_peak(self):
        device = jax.devices()[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        return stats["peak_bytes_in_use"] if stats else None

    def versions(self):
        return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


class SgdWorker(JaxWorker):
    """One program: gradient of the mean loss, and the update."""

    def build(self):
        super().build()
        self.train = self.jit(self._train, donate_argnums=0)

    def _train(self, params, batch, mask):
        gradient = self.clipped(params, batch, mask)
        factor = self.learning_rate / self.rows
        return jax.tree.map(lambda p, g: p - factor * g, params, gradient)

    def step(self):
        self.params = self.train(self.params, self.batch, self.everyone)
        jax.block_until_ready(self.params)

    def configure(self, options):
        super().configure(options)
        self.noise_multiplier = 0.0

    def clipped_sum(self):
        raise NotImplementedError("this system does not clip")


class TanagerWorker(JaxWorker):
    """tanager, with the options that it asks of XLA."""

    def jit(self, function, **more):
        return jax.jit(function, compiler_options=compiler_options(), **more)

    def prepare_clipping(self):
        import tanager

        _, strategy, *memory = self.system.split(":")
        self.grad_fn = tanager.clipped_grad(
            loss,
            clip_norm=self.clip_norm,
            strategy=strategy,
            memory=memory[0] if memory else "default",
        )
        self.grad_fn.tune(self.params, self.batch)

    def clipped(self, params, batch, mask):
        return self.grad_fn(params, batch, mask).sum

    def versions(self):
        import tanager

        return super().versions() | {"tanager": tanager.__version__}


class VmapWorker(JaxWorker):
    """The lines that people write: `vmap(grad)`, norms, a weighted sum."""

    def clipped(self, params, batch, mask):
        each = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
        squares = [
            jnp.sum(jnp.square(leaf.reshape(leaf.shape[0], -1)), axis=1)
            for leaf in jax.tree.leaves(each)
        ]
        norms = jnp.sqrt(functools.reduce(jnp.add, squares))
        factors = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norms, 1e-12))
        factors = jnp.where(mask, factors, 0.0)
        return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, axes=1), each)


class JaxPrivacyWorker(JaxWorker):
    """JAX-Privacy's `clipped_grad`, in microbatches if asked.

    Logical batches come in padded parts of one shape, as its
    `split_and_pad_global_batch` makes them: that is what the base class does too.
    """

    def prepare_clipping(self):
        import jax_privacy

        size = self.system.removesuffix(":options").partition(":")[2]
        self.grad_fn = jax_privacy.clipped_grad(
            loss,
            l2_clip_norm=self.clip_norm,
            keep_batch_dim=False,
            microbatch_size=int(size) if size else None,
        )

    def clipped(self, params, batch, mask):
        return self.grad_fn(params, batch, is_padding_example=~mask)

    def versions(self):
        import jax_privacy

        return super().versions() | {"jax-privacy": jax_privacy.__version__}


def make(system, work):
    """Return the worker of a system."""
    if system.startswith("tanager") or system.endswith(":options"):
        keep_freed_memory()
        run_in_place()
    kinds = {
        "jax-sgd": SgdWorker,
        "tanager": TanagerWorker,
        "jax-vmap": VmapWorker,
        "jax-privacy": JaxPrivacyWorker,
    }
    return kinds[system.split(":")[0]](system, work)


if __name__ == "__main__":
    protocol.serve(make)
