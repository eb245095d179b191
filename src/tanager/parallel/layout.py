"""The devices of a run as one mesh: which device holds what.

Every physical batch is cut into equal parts, one for each device. Each device adds up
the clipped gradients of its own rows; the devices' sums meet once for each logical
batch, in the update. Parameters are either whole on every device, or cut into shares
(`shard_parameters`): then a device holds a share of the parameters, of their average,
of the optimizer's state, of the sum and of the noise, gathers the parameters while it
computes on a physical batch, and hands each part of its sum to the device that holds
that share.
"""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from tanager import _validate as validate


AXIS = "data"
"""The name of the mesh's one axis."""

_WHOLE = PartitionSpec()

_LARGEST = 2**20
"""Physical batch that is always allowed, however few examples there are."""


class Layout:
    """Which device holds what, on a mesh of one axis over the first `devices` of JAX.

    None stands for all devices.
    """

    def __init__(self, devices: int | None = None, shard_parameters: bool = False):
        available = jax.devices()
        count = len(available) if devices is None else devices
        validate.whole(devices=count, at_least=1)
        if count > len(available):
            rule = f"must be at most {len(available)}, the devices that JAX finds"
            validate.refuse("devices", count, rule)
        if count < len(available) and jax.process_count() > 1:
            rule = f"must be all {len(available)} on several hosts"
            remedy = "leave it out, or start fewer hosts"
            validate.refuse("devices", count, rule, remedy)
        self.mesh = Mesh(np.array(available[:count]), (AXIS,))
        self.count = count
        self.shard_parameters = shard_parameters and count > 1
        processes = [device.process_index for device in self.mesh.devices]
        self._here = np.flatnonzero(np.array(processes) == jax.process_index())

    @classmethod
    def of(cls, tree: PyTree) -> Self:
        """Return the layout of arrays that are whole on every device; else of one."""
        for leaf in jax.tree.leaves(tree):
            mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
            if mesh is not None and mesh.axis_names == (AXIS,):
                return cls(devices=mesh.size)
        return cls(devices=jax.device_count() if jax.process_count() > 1 else 1)

    def check(self, physical_batch_size: int, examples: int = 0) -> None:
        """Refuse a physical batch that does not divide among devices, or is absurd."""
        most = -(-max(examples, _LARGEST) // self.count) * self.count
        if physical_batch_size > most:
            rule = f"must be at most {most}"
            remedy = "it only affects memory and speed; start with 256"
            validate.refuse("physical_batch_size", physical_batch_size, rule, remedy)
        if physical_batch_size % self.count:
            fits = max(physical_batch_size // self.count, 1) * self.count
            rule = f"must be a multiple of the {self.count} devices"
            remedy = f"give {fits} or {fits + self.count}, or fewer devices"
            validate.refuse("physical_batch_size", physical_batch_size, rule, remedy)

    def rows_each(self, physical_batch_size: int) -> int:
        """Return how many rows of a physical batch each device computes on."""
        return physical_batch_size // self.count

    def rows_here(self, physical_batch_size: int) -> np.ndarray:
        """Return which rows of a physical batch are this host's: int64[p]."""
        each = self.rows_each(physical_batch_size)
        return (self._here[:, None] * each + np.arange(each)).ravel()

    # Shapes decide which device holds what, never values, so that all hosts agree.

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Return the spec of a parameter: its longest axis that divides is cut."""
        axis = self._cut(shape)
        return _WHOLE if axis is None else PartitionSpec(*[None] * axis, AXIS)

    def specs(self, tree: PyTree) -> PyTree:
        """Return `spec` for every array of a tree."""
        return jax.tree.map(lambda leaf: self.spec(np.shape(leaf)), tree)

    def on_mesh(self, specs: PyTree) -> PyTree:
        """Return specs as shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    # From the host to the devices and back.

    def rows(self, tree: PyTree) -> PyTree:
        """Place the rows that `rows_here` names: one array over all devices."""
        sharding = NamedSharding(self.mesh, PartitionSpec(AXIS))
        share = len(self._here) / self.count

        def place(leaf: Any) -> Array:
            shape = (round(len(leaf) / share), *np.shape(leaf)[1:])
            return jax.make_array_from_process_local_data(sharding, leaf, shape)

        return jax.tree.map(place, tree)

    def parameters(self, tree: PyTree) -> PyTree:
        """Place parameters, or what is shaped like them, as `spec` says: copies."""
        return jax.tree.map(_place, tree, self.on_mesh(self.specs(tree)))

    def everywhere(self, tree: PyTree) -> PyTree:
        """Place a copy of every array on every device."""
        sharding = NamedSharding(self.mesh, _WHOLE)
        return jax.tree.map(lambda leaf: _place(leaf, sharding), tree)

    def shapes(self, tree: PyTree, specs: PyTree = _WHOLE) -> PyTree:
        """Return shapes for tracing a function of arrays placed by `specs`.

        A spec holds for all arrays below it. A trace depends on the mesh alone.
        """

        def below(spec: PartitionSpec, part: PyTree) -> PyTree:
            sharding = NamedSharding(self.mesh, spec)
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, jnp.result_type(leaf), sharding=sharding
                ),
                part,
            )

        return jax.tree.map(below, specs, tree)

    def gathered_everywhere(self, tree: PyTree) -> PyTree:
        """Return placed parameters whole, on every device."""
        if not self.shard_parameters:
            return tree
        everywhere = NamedSharding(self.mesh, _WHOLE)
        return jax.jit(lambda tree: tree, out_shardings=everywhere)(tree)

    def whole(self, tree: PyTree) -> PyTree:
        """Return arrays that are whole on every device as arrays of one of them."""

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Array) and len(leaf.sharding.device_set) > 1:
                return leaf.addressable_data(0)
            return leaf

        return jax.tree.map(one, tree)

    # Inside a function that each device runs on its own part (`jax.shard_map`).

    def gathered(self, tree: PyTree, like: PyTree) -> PyTree:
        """Return whole parameters, shaped like `like`, from every device's share."""

        def gather(leaf: Array, whole: Any) -> Array:
            axis = self._cut(np.shape(whole))
            if axis is None:
                return leaf
            return lax.all_gather(leaf, AXIS, axis=axis, tiled=True)

        return jax.tree.map(gather, tree, like)

    def scatter(self, tree: PyTree) -> PyTree:
        """Return the part of the devices' sums that this device accumulates.

        Of a parameter that is cut: this device's share of the sum over all devices.
        Of any other: its own sum, with a leading axis of 1; `reduce` adds them up.
        """

        def hand(leaf: Array) -> Array:
            axis = self._cut(leaf.shape)
            if axis is None:
                return leaf[None]
            return lax.psum_scatter(leaf, AXIS, scatter_dimension=axis, tiled=True)

        return jax.tree.map(hand, tree)

    def accumulator_shapes(self, like: PyTree) -> PyTree:
        """Return the shapes, over all devices, of what `scatter` returns."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            size = np.shape(leaf)
            size = (self.count, *size) if self._cut(size) is None else size
            return jax.ShapeDtypeStruct(size, leaf.dtype)

        return jax.tree.map(shape, like)

    def accumulator_specs(self, like: PyTree) -> PyTree:
        """Return the specs of what `scatter` returns, for `jax.shard_map`."""

        def spec(leaf: Any) -> PartitionSpec:
            cut = self.spec(np.shape(leaf))
            return cut if any(cut) else PartitionSpec(AXIS)

        return jax.tree.map(spec, like)

    def reduce(self, tree: PyTree, like: PyTree) -> PyTree:
        """Return the sums over all devices of what `scatter` returned, under `jax.jit`.

        This is the one all-reduce of a logical batch.
        """

        def meet(leaf: Array, like: Any) -> Array:
            if self._cut(np.shape(like)) is not None:
                return leaf
            return leaf.sum(axis=0, dtype=leaf.dtype)

        return self.constrain(jax.tree.map(meet, tree, like))

    def constrain(self, tree: PyTree) -> PyTree:
        """Constrain trees shaped like the parameters to `spec`, under `jax.jit`."""
        return jax.tree.map(
            lax.with_sharding_constraint, tree, self.on_mesh(self.specs(tree))
        )

    def _cut(self, shape: tuple[int, ...]) -> int | None:
        if not self.shard_parameters:
            return None
        fitting = [axis for axis, size in enumerate(shape) if size % self.count == 0]
        return max(fitting, key=lambda axis: shape[axis], default=None)


def _place(leaf: Any, sharding: NamedSharding) -> Array:
    # A copy: what is placed may be donated, the caller's arrays not.
    values = np.array(leaf)
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index]
    )
