"""What every private run is made of: a problem, an algorithm and a runtime.

    problem = Problem(loss, params, data)
    algorithm = DPSGD(mechanism, delta=1e-5, optimizer=optax.sgd(4.0))
    train(problem, algorithm, Runtime(physical_batch_size=64), out="runs/mine")

A problem says what is learned and from whom. An algorithm says how, and under which
guarantee. A runtime says how fast: nothing in it changes what is computed, except the
order in which floats are added within a physical batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager.adaptive import AdaptiveClipping
from tanager.clipping import STRATEGIES
from tanager.clipping.analysis import batches, keyed
from tanager.clipping.rules.factors import CLIP, Style, style_of
from tanager.clipping.transform import split
from tanager.data import Source, as_source
from tanager.data.grouped import Grouped
from tanager.data.loader import Unreadable
from tanager.groups import Groups
from tanager.parallel.layout import Layout
from tanager.privacy.account import Account
from tanager.privacy.accountant import check_claim, composed_epsilon
from tanager.privacy.class_counts import require_release
from tanager.privacy.mechanism import Mechanism, common_adjacency


def _as_it_is(model: PyTree) -> PyTree:
    return model


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Describe what is learned, and from which data.

    Attributes:
        loss: ``loss(params, example) -> scalar`` for ONE example. One that takes a
            third argument, ``key``, with a default or without, is given the key of
            `tanager.example_keys`: for dropout, say. It needs an
            `augmentation_multiplicity` of at least 1.
        params: initial parameters: a pytree of arrays or an Equinox module; its float
            leaves are trained, or those that `trainable` names. They must not depend on
            the private data.
        data: the private examples: a pytree of arrays with one leading axis, or
            anything with ``len(data)`` and ``data[index] -> example``; or
            `tanager.Grouped`, which protects persons with several examples.
        augment: ``augment(key, example) -> example``, one random view; None for the
            example itself.
        trainable: which float leaves are trained, see `tanager.clipped_grad`; the
            others stay as they are and cost no gradient, noise or optimizer memory.
        finish: from the trained model to the model that is handed over, such as
            `tanager.models.merge`. It must not look at private data.
        unreadable: what to do about an example that cannot be read
            (`tanager.data.UnreadableExample`): ``"error"`` stops the run; ``"skip"``
            counts its gradient as zero.
        account: of these data: every run and audit on them is charged there before its
            first step. None charges nothing.
        labels: returns the classes of all examples, int[n], for class weights from
            noisy counts (`tanager.training.class_weights.balanced`).

    Raises:
        ValueError: `unreadable` is another word, or an argument is of another kind.
    """

    loss: Callable[..., jax.Array]
    params: PyTree = dataclasses.field(repr=False)
    data: Any = dataclasses.field(repr=False)
    augment: Callable[[jax.Array, Any], Any] | None = None
    trainable: PyTree | Callable[[Any], bool] | None = None
    finish: Callable[[PyTree], PyTree] = _as_it_is
    unreadable: Unreadable = "error"
    account: Account | None = None
    labels: Callable[[], np.ndarray] | None = None

    def __post_init__(self):
        validate.one_of(get_args(Unreadable), unreadable=self.unreadable)
        validate.instance_or_none(Account, account=self.account)
        functions = {"augment": self.augment, "finish": self.finish}
        validate.function_or_none(**functions, labels=self.labels)
        if keyed.takes_key(self.loss):
            object.__setattr__(self, "augment", keyed.keyed_views(self.augment))
            object.__setattr__(self, "loss", keyed.given_key(self.loss))

    def source(self) -> Source:
        """Return the examples with random access."""
        grouped = isinstance(self.data, Grouped)
        return self.data.source if grouped else as_source(self.data)

    @property
    def groups(self) -> Groups | None:
        """Which person each example belongs to; None if examples are protected."""
        return self.data.groups if isinstance(self.data, Grouped) else None

    def size(self) -> int:
        """Return N, the number of units of privacy: of examples, or of persons."""
        return len(self.source() if self.groups is None else self.groups)

    @property
    def unit(self) -> str:
        """What the guarantee protects: one of "example" or "person"."""
        return "example" if self.groups is None else "person"

    def as_json(self) -> dict[str, Any]:
        """Return what config.json records."""
        groups = self.groups
        return {
            "unit": self.unit,
            "examples_per_group": None if groups is None else groups.examples_per_group,
            "unreadable": self.unreadable,
        }

    def split(self) -> tuple[PyTree, PyTree]:
        """Return the leaves that are trained and the others, None in their places.

        NumPy's float64 becomes what JAX computes with.
        """
        trained, fixed = split(self.params, self.trainable)
        return jax.tree.map(_canonical, trained), fixed


def _canonical(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray | np.generic):
        return leaf
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class DPSGD:
    """Describe how it is learned, and under which guarantee.

    Attributes:
        mechanism: sample rate, noise multiplier and steps, from `tanager.calibrate` for
            instance; the sampler, the noise and the accountant all use it.
        optimizer: optax transformation; it is given the noisy sum of gradients clipped
            to norm 1, divided by the expected batch size (equation 3 of the Unlocking
            paper), so the learning rate does not depend on `clip_norm`.
        delta: the δ of the guarantee, best at most 0.1/N.
        clip_norm: C; None trains WITHOUT privacy, on gradients as they are, and takes a
            mechanism with noise multiplier 0. Use it to pretrain on public data.
        style: how gradients are brought to C, ``"clip"``, ``"automatic"`` or a
            `clipping.Style`, as for `clipped_grad`; the guarantee is the same.
        adaptive: how C follows the norms of the gradients, from `clip_norm` on; its
            noisy counts are part of the guarantee. None keeps C.
        augmentation_multiplicity: K views averaged before clipping (equation 4); 0
            without augmentation.
        ema_decay: of the parameter average, below 1, with warm-up (appendix C.3); at 0
            the average is the parameters.
        declared_examples: the size N that updates are divided by, times the sample
            rate, and that is published; None for len(data). Under add-or-remove-one
            len(data) is private, and a size must be given that was chosen without
            looking at it.
        accountant: whose ε is claimed, "pld" or "rdp", see
            `tanager.privacy.accountant.Accountant`.
        class_counts: the release of class counts before the first step, from
            `tanager.privacy.class_counts.release_of`; None releases none.

    Raises:
        ValueError: a field is out of range.
    """

    mechanism: Mechanism
    optimizer: optax.GradientTransformation
    _: dataclasses.KW_ONLY
    delta: float
    clip_norm: float | None = 1.0
    style: str | Style = "clip"
    adaptive: AdaptiveClipping | None = None
    augmentation_multiplicity: int = 0
    ema_decay: float = 0.9999
    declared_examples: int | None = None
    accountant: str = "pld"
    class_counts: Mechanism | None = None

    def __post_init__(self):
        validate.instance(Mechanism, mechanism=self.mechanism)
        validate.instance_or_none(AdaptiveClipping, adaptive=self.adaptive)
        validate.probability(delta=self.delta)
        if self.class_counts is not None:
            require_release(self.class_counts)
        check_claim(self.accountant, common_adjacency(self.mechanisms()))
        if self.clip_norm is not None:
            validate.clipping_norm(self.clip_norm)
        style = self.clipping_style
        if style.name == "unit":
            rule = "must be clip or automatic: updates are divided by C already"
            validate.refuse("style", "unit", rule)
        if self.adaptive is not None and (self.clip_norm is None or style != CLIP):
            rule = "must be None unless gradients are clipped, in style clip"
            validate.refuse("adaptive", self.adaptive, rule)
        validate.whole(
            augmentation_multiplicity=self.augmentation_multiplicity, at_least=0
        )
        validate.ema_decay(self.ema_decay)

    @property
    def clipping_style(self) -> Style:
        """`style` as a `clipping.Style`."""
        return style_of(self.style)

    def mechanisms(self) -> list[Mechanism]:
        """Return all that a run spends: on the class counts, if any, and the steps."""
        return [*filter(None, (self.class_counts,)), self.mechanism]

    def claimed_epsilon(self) -> float:
        """Return ε of all that a run spends at `delta`, by PLD; infinite without noise.

        Whoever states the ε of an algorithm takes it from here: `mechanism` alone
        leaves out the class counts.
        """
        return composed_epsilon(self.mechanisms(), self.delta)

    def require_clip_norm(self) -> float:
        """Return C; refuse an algorithm that clips nothing."""
        if self.clip_norm is None:
            validate.refuse("clip_norm", None, "must be a number", "the papers use 1.0")
        return self.clip_norm

    def public_size(self, examples: int) -> int:
        """Return the size that updates are divided by, times the sample rate.

        Raises:
            ValueError: the number of examples is private, and no other is declared.
        """
        if self.declared_examples is None:
            self.mechanism.require_public_size()
            return examples
        validate.whole(declared_examples=self.declared_examples, at_least=1)
        return self.declared_examples

    def as_json(self, public_size: int) -> dict[str, Any]:
        """Return what config.json records; the size is that of `public_size`."""
        style = self.clipping_style
        return {
            "mechanism": dataclasses.asdict(self.mechanism),
            "examples": public_size,
            "batch_size": round(self.mechanism.sample_rate * public_size, 6),
            "clip_norm": self.clip_norm,
            "clip_gamma": style.gamma if style.name == "automatic" else None,
            "adaptive_clipping": self.adaptive and dataclasses.asdict(self.adaptive),
            "delta": self.delta,
            "augmentation_multiplicity": self.augmentation_multiplicity,
            "ema_decay": self.ema_decay,
            "accountant": str(self.accountant),
            "class_counts": self.class_counts and dataclasses.asdict(self.class_counts),
        }


@dataclasses.dataclass(frozen=True)
class Runtime:
    """Set speed and memory of a run, which never change what it computes.

    Attributes:
        physical_batch_size: examples computed on at once, by all devices together;
            fewer if an update is unlikely to have that many.
            ``"auto"`` tries sizes on no example and takes the fastest that fits the
            memory (`tanager.training.sizing`); a resume keeps it.
        strategy: how `tanager.clipped_grad` clips. ``"auto"`` measures this device
            first where that pays, once for each model and physical batch size.
        measure_share: at most this share of the run's time goes into that, and as much
            into sizes; 0 measures nothing, and takes the fastest known or expected.
        memory: ``"low"`` clips for less memory, see `tanager.clipped_grad`.
        devices: how many devices to train on, None for all. Each computes on an equal
            part of every physical batch. On several hosts (`tanager.parallel.hosts`)
            every one of them makes the same call.
        shard_parameters: cut the parameters, their average, the optimizer's state and
            the sums into shares, one for each device.
        workers: processes that read and decode examples ahead of the devices, where
            the data are not held in memory; 0 for a thread of this one. A program that
            starts processes must be importable: put the call under
            ``if __name__ == "__main__":``.
        checkpoint_seconds: least time between checkpoints.
        progress: show a progress bar.

    Raises:
        ValueError: a number is out of range, or an argument is of another kind.
    """

    physical_batch_size: int | Literal["auto"] = 256
    strategy: str = "auto"
    measure_share: float = 0.1
    memory: str = "default"
    devices: int | None = None
    shard_parameters: bool = False
    workers: int = 0
    checkpoint_seconds: float = 30.0
    progress: bool = True

    def __post_init__(self):
        validate.size_or_auto(physical_batch_size=self.physical_batch_size)
        validate.one_of(STRATEGIES, strategy=self.strategy)
        validate.one_of(batches.MEMORY, memory=self.memory)
        validate.whole(workers=self.workers, at_least=0)
        flags = {"shard_parameters": self.shard_parameters, "progress": self.progress}
        validate.instance(bool, "True or False", **flags)
        validate.not_negative(checkpoint_seconds=self.checkpoint_seconds)
        validate.share(measure_share=self.measure_share)

    def layout(self) -> Layout:
        """Return which device holds what."""
        return Layout(self.devices, self.shard_parameters)

    def as_json(self) -> Mapping[str, Any]:
        """Return what config.json records; a resumed run may change all of it."""
        record = dataclasses.asdict(self)
        del record["progress"]
        return record
