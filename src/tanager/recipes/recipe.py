"""A recipe: everything that one training run is made of, as one frozen object."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal, Self

from tanager import _validate as validate
from tanager.data.layout import Uncertain
from tanager.data.loader import Unreadable
from tanager.privacy.mechanism import Adjacency
from tanager.recipes.fields import (
    AccountantName,
    AdjacencyName,
    AugmentationName,
    ClassWeights,
    Clipping,
    FineTuning,
    Head,
    HeadInput,
    NormalisationOrder,
    PaddingMode,
    PrecisionName,
    Schedule,
    Solved,
    SolverName,
    UnitName,
    check,
)
from tanager.recipes.papers import PublishedRun, fields_at


FIXED_FRONTS = "scattering-", "dead-leaves-"
"""Models whose features are fixed, whatever is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training run. Field names are the flags of `tanager train`.

    Of epsilon, noise_multiplier and steps at least two are given, and `solve_for` says
    which number follows from the others (see `tanager.recipes.budget`).

    Attributes:
        dataset: name of the data set; folder for your own images.
        data: folder or file with the data; not needed for digits.
        labels: CSV file with a row for each image: its path, and its label. Default:
            the only CSV file of a folder without class folders.
        image_column: column with the images. Default: the one that names or holds them.
        label_column: column with the labels. Default: label, or a similar name.
        labels_from_name: the name of a file begins with its class: cat in cat_01.png.
        multi_label: an image has any number of labels. The CSV file has one column of
            names separated by vertical bars, or a column of 0 and 1 for each label.
        uncertain: what a label of -1 (uncertain) counts as.
        classes: train and test on these classes, or labels, only. Default: all.
        image_size: resize images to this many pixels per side. Default: what the
            weights were trained on, else as they are; if images of a folder differ in
            size, what the weights or models like it were trained on. Images of a folder
            are resized when read, others before the model.
        crop_fraction: part of each side that is kept: 1 keeps all, 0.875 the middle.
            Default: what the weights are evaluated with, else 1.
        preprocessing: file that says how images are resized and standardised (timm's
            config.json, transformers' preprocessor_config.json), or data, for the data
            set's mean and deviation. Default: beside the weights, else data.
        model: name of the model, see `tanager models`; auto for one with public weights
            if they are installed, else one that needs none (docs/training.md).
        implementation: whose code the model follows, such as tan or timm. Default:
            tanager's.
        normalisation_order: norm, ReLU, convolution (pre-activation); ReLU, norm,
            convolution (post-activation); or none for no norms.
        weight_standardisation: standardise the weights of every convolution.
        weights: pretrained weights: a file, a folder, hf:OWNER/NAME or timm/NAME.
            Default: random weights.
        head: start the last layer from the given weights (load), at random (fresh), or
            at zero.
        head_input: what the last layer sees: features, those scaled to norm 1 (norm),
            or their square roots, centred and scaled (root), for features from a ReLU;
            auto for root or norm where the last layer alone is trained.
        mirror: let the last layer see the mean of the features of an image and of its
            mirror image, at twice the cost; for images that may be mirrored.
        solver: how the last layer is computed: dp-sgd; class-means, one noisy sum; or
            auto, the better of the two for N, ε and features, with steps and learning
            rate for it; dp-sgd if one of these is given, or more is trained.
        fine_tune: what to train: all layers, the last one, the last stage, biases and
            norms, a scale and shift per channel (film), low-rank products (lora); auto
            for the last layer if there are weights, else all.
        lora_rank: rank of the low-rank products.
        features: folder that caches the input of the last layer or stage, for these
            choices of fine_tune without augmentation, or features that are fixed
            (scattering, dead leaves). Default: in the run's private folder.
        features_from: file of features that another program made (.npz, .parquet, or
            train_features.npy): trains the model linear on them, without images.
        non_private: train WITHOUT privacy, on public data: no clipping, no noise.
        epsilon: privacy budget ε.
        delta: δ of the guarantee. Default: 0.1/N or less, one digit.
        accountant: how ε is computed: pld, which is tight, or rdp, as papers report it.
        batch_size: expected batch size B, in examples; the sample rate is q = B/N. 0
            for all of them (no sampling, the Gaussian mechanism), or for fewer if other
            settings are left open and that is better.
        noise_multiplier: σ: standard deviation of the noise divided by the clipping
            norm; solved for if not given.
        steps: number of updates T; solved for if σ and ε are given.
        solve_for: the number that is solved for, whatever its field says. None solves
            for the missing one; with none missing, for epsilon, and if that exceeds the
            recipe's, noise_multiplier is raised. nothing refuses that instead.
        adjacency: which data sets count as neighbours; see docs/choosing.md.
        unit: what is protected as a whole: one image (example), or all images of one
            person (group). With group, batch size and N count persons.
        groups: which person each image belongs to: folder (a folder for each person, in
            each class folder if there are any), or a CSV column. Splits are by person.
        examples_per_group: largest number of images of a person that an update uses.
        declared_examples: public number of examples N, if it differs from the data's.
            Required with add-or-remove-one, which protects the true number.
        clip_norm: clipping norm C: largest gradient norm of one example; 0 chooses it.
        clipping: clip scales longer gradients to C; automatic scales all of them to
            just below C; adaptive begins at C and follows the median norm, by noisy
            counts that are part of the budget.
        class_weights: what the loss of each class is multiplied by, such as rare 5; 1
            where none is given. They must be public. Or balanced: in inverse proportion
            to class counts, with noise that is part of the budget.
        optimizer: name of an optax optimizer, such as sgd or adamw.
        optimizer_options: options of the optimizer besides the learning rate, such as
            momentum 0.9.
        learning_rate: learning rate, for the gradient sum divided by C and by B; 0 to
            choose it from N and ε.
        learning_rate_schedule: constant; step: a tenth after half of the steps, again
            after three quarters; or cosine, down to 0.
        warmup_steps: updates in which the learning rate rises from 0.
        weight_decay: this times the parameters is added to the gradient; 0 in the
            papers' DP runs.
        ema_decay: decay per update of the parameter average, below 1; 0 for no average.
        augmentation: how images are varied at random, see `tanager.data.augment`.
        augmentation_multiplicity: augmented views K of each image, averaged before
            clipping; 0 for no augmentation.
        crop_padding: for crop-flip and tan: pixels mirrored onto each edge before a
            random crop. The papers use 4 on CIFAR, 20 on ImageNet.
        padding_mode: how these pixels are mirrored: reflect, or symmetric, which
            repeats the pixel at the edge, as the Unlocking paper's released code does.
        flip: flip images at random, left to right.
        crop_size: pixels per side of the crop that the model sees. Default: all.
        test_views: views of each test image that vote on its class; 0 for no vote.
        validation_examples: number of training images held out for validation, or of
            persons with groups.
        train_examples: train on only this many of the remaining images. Default: all.
        physical_batch_size: images, or persons, computed on at once, by all devices
            together; lower it if memory is short. auto: the fastest size that fits.
            Default: 256, or 4096 for a last layer on features; a whole batch, if less.
        strategy: how gradients are clipped; changes speed and memory only. auto:low
            often takes less memory.
        precision: arithmetic of the model: float32; tf32, which rounds products to 10
            bits of mantissa on GPUs that can; or bfloat16. Clipping, sums and noise are
            always float32.
        devices: number of devices to train on. Default: all.
        shard_parameters: split parameters and optimizer state over the devices, for
            models that are too large for one.
        stream: True reads images when they are needed, False all of them first.
            Default: stream more than 4 GiB.
        workers: processes that decode streamed images. Default: one per processor.
        unreadable: what an unreadable image does: stop with an error, or contribute
            zero (skip).
        evaluate_every: updates between evaluations.
        checkpoint_seconds: least number of seconds between checkpoints.
        seed: a number makes the run repeatable by anyone, so NOT private. Default: a
            secret from the operating system.
        out: folder of the run, which is resumed if it stopped. Default: in runs/.
        account: file that all runs on these data are charged to (`tanager account`);
            none for no account. Default: beside the data, or for this user.

    Raises:
        ValueError: a field is out of range.
    """

    dataset: str
    data: str | None = None
    labels: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    labels_from_name: bool = False
    multi_label: bool = False
    uncertain: Uncertain = "refuse"
    classes: tuple[str, ...] | None = None
    image_size: int | None = None
    crop_fraction: float | None = None
    preprocessing: str | None = None
    model: str
    implementation: str | None = None
    normalisation_order: NormalisationOrder = "post-activation"
    weight_standardisation: bool = True
    weights: str | None = None
    head: Head = "fresh"
    head_input: HeadInput = "features"
    mirror: bool = False
    solver: SolverName = "dp-sgd"
    fine_tune: FineTuning = "all"
    lora_rank: int = 8
    features: str | None = None
    features_from: str | None = None
    non_private: bool = False
    epsilon: float | None = None
    delta: float | None = None
    accountant: AccountantName = "pld"
    batch_size: int
    noise_multiplier: float | None = None
    steps: int | None = None
    solve_for: Solved | None = None
    adjacency: AdjacencyName = "zero-out"
    unit: UnitName = "example"
    groups: str | None = None
    examples_per_group: int = 4
    declared_examples: int | None = None
    clip_norm: float = 1.0
    clipping: Clipping = "clip"
    class_weights: ClassWeights | dict[str, float] = dataclasses.field(
        default_factory=dict
    )
    optimizer: str = "sgd"
    optimizer_options: dict[str, float] = dataclasses.field(default_factory=dict)
    learning_rate: float
    learning_rate_schedule: Schedule = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    ema_decay: float = 0.9999
    augmentation: AugmentationName = "crop-flip"
    augmentation_multiplicity: int = 0
    crop_padding: int = 0
    padding_mode: PaddingMode = "reflect"
    flip: bool = False
    crop_size: int | None = None
    test_views: int = 0
    validation_examples: int = 0
    train_examples: int | None = None
    physical_batch_size: int | Literal["auto"] | None = None
    strategy: str = "auto"
    precision: PrecisionName = "tf32"
    devices: int | None = None
    shard_parameters: bool = False
    stream: bool | None = None
    workers: int | None = None
    unreadable: Unreadable = "error"
    evaluate_every: int = 100
    checkpoint_seconds: float = 60.0
    seed: int | None = None
    out: str | None = None
    account: str | None = None

    def __post_init__(self):
        check(self)
        # A shell does not expand the ~ of --out=~/run.
        for name in ("out", "features", "account"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, os.path.expanduser(path))

    def public_size(self, examples: int) -> int:
        """Return N, which q, the divisor of updates and δ are computed from.

        Raises:
            ValueError: the number of `examples` is private, and no other is declared;
                or some of them are chosen by their rank among all.
        """
        protected = self.adjacency == Adjacency.ADD_OR_REMOVE_ONE
        by_rank = {
            "train_examples": self.train_examples,
            "validation_examples": self.validation_examples or None,
        }
        for name, value in by_rank.items():
            if protected and value is not None and not self.non_private:
                rule = "must be left out under add-or-remove-one: with one example "
                rule += "more, others would be chosen"
                remedy = f"leave out --{name.replace('_', '-')}, or --adjacency"
                validate.refuse(name, value, rule, remedy)
        if self.declared_examples is not None:
            return self.declared_examples
        if protected and not self.non_private:
            rule = "must be given under add-or-remove-one, which protects the number "
            rule += "of examples"
            remedy = "give --declared-examples, a round number chosen without counting"
            remedy += "; or leave out --adjacency: under zero-out the number is public"
            validate.refuse("declared_examples", None, rule, remedy)
        return examples

    def require_batches(self) -> None:
        """Refuse what a search cannot vary, count, or compare by its accuracy.

        Raises:
            ValueError: batch_size is 0, solver is not dp-sgd, there are labels, or
                class_weights is balanced.
        """
        if self.multi_label:
            rule = "must be left out of a search, which compares accuracies"
            validate.refuse("multi_label", True, rule)
        self.refuse_balanced("in a search, which does not count the class counts")
        if self.solver != "dp-sgd" or self.leaves_open:
            remedy = "give --solver dp-sgd, --batch-size, --steps, --learning-rate and "
            rule = "must be dp-sgd in a search, with all settings given"
            validate.refuse("solver", self.solver, rule, f"{remedy}--clip-norm")
        validate.whole(batch_size=self.batch_size, at_least=1)

    def refuse_balanced(self, where: str) -> None:
        """Refuse class weights from noisy counts where these would not be counted."""
        if self.class_weights == "balanced":
            rule, remedy = f"is not supported {where}", "give a weight for each class"
            validate.refuse("class_weights", "balanced", rule, remedy)

    @property
    def leaves_open(self) -> bool:
        """Whether settings of the solver are left to be chosen, from N and ε."""
        steps = self.steps or self.noise_multiplier is not None or self.batch_size
        given = self.learning_rate and self.clip_norm and steps
        return self.solver == "auto" or not given

    @property
    def style(self) -> str:
        """The style of `DPSGD`: a norm that adapts is one that gradients are cut to."""
        return "automatic" if self.clipping == "automatic" else "clip"

    @property
    def strategy_and_memory(self) -> tuple[str, str]:
        """Both as `Runtime` takes them, from ``"auto:low"``, for example."""
        strategy, _, memory = self.strategy.partition(":")
        return strategy, memory or "default"

    @property
    def physical_rows(self) -> int | Literal["auto"]:
        """The physical batch size, chosen if none is given."""
        return self.physical_batch_size or (4096 if self.caches_features else 256)

    @property
    def caches_features(self) -> bool:
        """Whether the last layer alone is trained, on inputs that never change."""
        return self.fine_tune == "last-layer" and not self._views

    @property
    def caches_front(self) -> bool:
        """Whether all that is trained sees what never changes, of several axes."""
        late = self.fine_tune == "last-stage"
        late |= self.model.startswith(FIXED_FRONTS) and self.fine_tune == "all"
        return late and not self._views and self.unreadable == "error"

    @property
    def caches(self) -> bool:
        """Whether frozen layers see each image once, and what they make is kept."""
        return self.caches_features or self.caches_front

    @property
    def _views(self) -> int:
        return self.augmentation_multiplicity or self.test_views

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values that `json.dumps` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Make a recipe of what `to_json` returned.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name in fields:
            validate.one_of(known, field=name)
        required = {"dataset", "model", "batch_size", "learning_rate"}
        if missing := sorted(required - set(fields)):
            raise ValueError(f"recipe lacks {', '.join(missing)}: give every field")
        values = dict(fields)
        if values.get("classes") is not None:
            values["classes"] = tuple(values["classes"])
        return cls(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeEntry:
    """A recipe with a name, where it comes from and what it is known to reach.

    Attributes:
        name: after `tanager train`.
        summary: one sentence.
        source: paper and table, or "tanager" without a published number.
        recipe: the run by default.
        published: the paper's rows of this recipe, at rising ε.
        pretrained_on: what the weights to start from were trained on; empty for none.
        expected: the accuracy to expect and its source, if no published row has it;
            empty if it is unknown.
    """

    name: str
    summary: str
    source: str
    recipe: Recipe
    published: tuple[PublishedRun, ...] = ()
    pretrained_on: str = ""
    expected: str = ""

    @property
    def expected_accuracy(self) -> str:
        """The accuracy that the default recipe reached, as text."""
        for row in self.published:
            if row.epsilon == self.recipe.epsilon and row.accuracy is not None:
                spread = "" if row.accuracy_std is None else f" ± {row.accuracy_std}"
                return f"{row.accuracy}{spread} % at ε = {row.epsilon:g}"
        return self.expected or "not known"

    def at_epsilon(self, epsilon: float) -> Recipe:
        """Return the recipe for another budget.

        At a published ε: the published hyper-parameters. Between two of them: batch
        size, steps and learning rate between theirs, on a logarithmic scale. Beyond
        them: steps in proportion to ε, as in section 4.2 of the Unlocking paper.
        Without published rows: the recipe's own steps. σ is published with the rest, or
        left to be solved for.

        Raises:
            ValueError: `epsilon` is not a positive number.
        """
        validate.positive(epsilon=epsilon)
        if not self.published:
            changes = {"epsilon": epsilon, "noise_multiplier": None}
            return dataclasses.replace(self.recipe, **changes)
        return dataclasses.replace(self.recipe, **fields_at(self.published, epsilon))
