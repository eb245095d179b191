"""Load public weights into a model, and save a model for other libraries.

`load_weights` takes a file of any library in `foreign.tables`, or of tanager. It finds
out which one wrote it by the names in it, and refuses a file that does not fit. Every
tensor that is left out, cast or resized is recorded.
"""

import collections
import contextlib
import itertools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tanager import _validate as validate
from tanager._cache import expanded
from tanager._reading import read_json, reading
from tanager._text import clean
from tanager.data.preprocessing import Preprocessing
from tanager.models import hub, packaged, pytorch, weights
from tanager.models.foreign import preprocessing
from tanager.models.foreign.layouts import SAME, Foreign, Table, folded, unfolded
from tanager.models.foreign.tables import FORMATS, Format
from tanager.models.layers import ScaledHead
from tanager.models.published import PUBLISHED
from tanager.models.tensors import FLOATS, file_in, files_of, read_tensors
from tanager.models.tuning import with_zero_head
from tanager.models.vit import fit_positions


HEADS = ("load", "fresh", "zero")
"""What `load_weights` does about the head."""

OWN_FORMAT = "tanager"
_HEAD = "head."
_DTYPE = "other numbers"
_WRAPPERS = re.compile(
    r"^(?:(?:_?module|_orig_mod|model|backbone)\.)+|~(?:norm|conv)_fn/"
)
"""What is in names because of what a model was in: DataParallel, Opacus,
`torch.compile`, a training loop; and methods, in old files of jax_privacy."""


class Loaded(NamedTuple):
    """A model with loaded weights.

    Attributes:
        model: the model.
        origin: where they come from, as JSON: ``weights`` (the name on the Hub or of
            the file, without its folder), ``format``, ``sha256`` of the file (of index
            and files one after the other, if it is in several), ``head``, and
            ``changes``, one sentence for each difference between file and model.
    """

    model: Any
    origin: dict[str, Any]


def formats(model: Any) -> tuple[str, ...]:
    """Return the formats that a model's weights can be read in and written in."""
    return tuple(_forms(model))


def load_weights(
    model: Any, source: str | os.PathLike[str], *, head: str = "load"
) -> Loaded:
    """Load pretrained weights into a model.

    Numbers in float16, bfloat16 or float64 become float32, as the model's are.
    Position embeddings for another square grid of patches are resized (see
    `vit.fit_positions`).

    For your own classes, choose how the head starts. ``"fresh"`` keeps the head of the
    model, Gaussian with variance 1/fan-in, as DeepMind's code for the Unlocking paper
    does. ``"zero"`` makes all logits 0: Mehta et al. 2022 (arXiv:2205.02973) find
    near-zero heads best when the last layer is trained privately in few steps.

    Args:
        model: of the architecture of the weights; what is loaded may be shapes, as
            `equinox.filter_eval_shape` returns them.
        source: a safetensors file of timm, of Hugging Face transformers or of tanager,
            or the index of several; an npz file of Google's; a ``.dill`` file of
            jax_privacy's; a folder with a ``model.safetensors`` or its index; a name on
            the Hub, ``hf:timm/vit_base_patch16_224.augreg_in21k``, where ``hf:`` may be
            left out for timm's; or one of `packaged.PACKAGED`, such as
            ``efficientnet-lite0``.
        head: ``"load"`` the head too, keep the model's (``"fresh"``), or set it to 0
            (``"zero"``).

    Returns:
        The model and where its weights come from.

    Raises:
        ValueError: the file cannot be read (see `tensors.read_tensors`), or does not
            fit: the message counts the tensors that are missing, extra, of another
            shape or dtype, or not finite, and names the first of each kind.
        OSError: a file on the Hub cannot be downloaded.
    """
    validate.one_of(HEADS, head=head)
    source = hub.full_name(source)
    path = find_weights(source)
    found = pytorch.read(path) if packaged.is_packaged(path) else read_tensors(path)
    changes: list[str] = []
    if head != "load":
        _require_head(model)
    name, table, form, theirs, refusals = _recognise(model, found, source)
    renamed = len(found.keys() - theirs.keys())
    if renamed:
        changes.append(f"{renamed} tensors named without the prefixes of wrappers")
    if form.batch_norm_eps is not None:
        theirs = folded(theirs, form.batch_norm_eps)
        changes.append("batch norms folded into scales and shifts")
    for unused in form.unused:
        if theirs.pop(unused, None) is not None:
            changes.append(f"{unused} left out: no logit depends on it")
    ours = weights.named_tensors(model)
    if head != "load":
        ours = {key: leaf for key, leaf in ours.items() if not key.startswith(_HEAD)}
        heads = tuple(
            part.removesuffix(re.split("[./]", part)[-1])
            for key in table
            if key.startswith(_HEAD)
            for part in table[key].names
        )
        # All that is theirs there: a bias too, where our head has none.
        theirs = {part: theirs[part] for part in theirs if not part.startswith(heads)}
        changes.append(f"head {'as created' if head == 'fresh' else 'set to zero'}")
    arrays, misfits = _fit(model, ours, theirs, table, changes)
    if misfits:
        raise ValueError(
            f"weights (={os.fspath(source)!r}), read as {name}, do not fit this "
            f"{type(model).__name__}:\n  "
            + "\n  ".join([*weights.first_of_each_kind(misfits), *refusals])
            + f"\n{_remedy(misfits, table)}"
        )
    loaded = weights.replace_tensors(model, arrays)
    if head == "zero":
        loaded = with_zero_head(loaded)
    origin = {
        "weights": source if hub.is_hub_name(source) else path.name,
        "format": name,
        "sha256": hub.sha256(*files_of(path)),
        "head": head,
        "changes": changes,
    }
    return Loaded(loaded, origin)


def preprocessing_of(source: str | os.PathLike[str]) -> Preprocessing | None:
    """Return the preprocessing that weights were trained with, from their neighbours.

    It is in the folder of the weights: ``preprocessor_config.json`` of transformers, or
    ``config.json`` of timm, of an export or of a run of tanager. Where the Hub does not
    give such a file, it is what `PUBLISHED` knows. None if nothing says it. The source
    is as of `load_weights`.

    Raises:
        ValueError: such a file is damaged, or asks for what `Preprocessing` cannot do.
    """
    source = hub.full_name(source)
    if hub.is_hub_name(source):
        return _on_hub(str(source))
    if source in packaged.PACKAGED and not Path(source).exists():
        return packaged.PACKAGED[str(source)].preprocessing
    path = expanded(source)
    folder = path if path.is_dir() else path.parent
    for name in _DESCRIPTIONS:
        if (folder / name).is_file() and (found := read_preprocessing(folder / name)):
            return found
    return _BIT if path.name.startswith("BiT-") else None


_DESCRIPTIONS = ("preprocessor_config.json", "config.json")
_BIT = Preprocessing(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear")
"""Of Google's npz files, which lie alone."""


def read_preprocessing(path: str | os.PathLike[str]) -> Preprocessing | None:
    """Return the preprocessing in a JSON file of timm, transformers or tanager."""
    config = read_json(path, argument="preprocessing")
    with reading(path, "cannot be followed", argument="preprocessing"):
        return preprocessing.read(config)


def _on_hub(name: str) -> Preprocessing | None:
    for file in _DESCRIPTIONS:
        path = None
        with contextlib.suppress(ValueError, OSError):  # no such file, or off line
            path = hub.download(hub.beside(name, file))
        if path is not None and (found := read_preprocessing(path)):
            return found
    for published in itertools.chain.from_iterable(PUBLISHED.values()):
        if published.weights == name:
            sides = (published.image_size, published.image_size)
            return Preprocessing(mean=published.mean, std=published.std, size=sides)
    return None


def save_weights(
    model: Any,
    path: str | os.PathLike[str],
    *,
    format: str = OWN_FORMAT,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save a model's weights with the names and layouts of a library.

    Args:
        model: the model.
        path: the safetensors file to write or replace, atomically.
        format: one of `formats(model)`.
        metadata: strings saved beside the tensors. By default ``{"format": "pt"}`` in
            the formats of PyTorch libraries, which require it.

    Raises:
        ValueError: the model cannot be written in this format.
    """
    table = table_of(model, format)
    if format != OWN_FORMAT and (model.mirror or isinstance(model.head, ScaledHead)):
        rule = "cannot hold mirror or head_input, which change what the head sees"
        validate.refuse("format", format, rule, f"use {OWN_FORMAT!r}")
    if metadata is None and format != OWN_FORMAT:
        metadata = {"format": "pt"}
    theirs = {}
    for name, leaf in weights.named_tensors(model).items():
        parts = table[name].to_theirs(np.asarray(leaf))
        theirs |= zip(table[name].names, parts, strict=True)
    eps = _forms(model)[format].batch_norm_eps
    if eps is not None:
        scales = (name for name in table if name.endswith("norm.scale"))
        norms = (table[name].names[0].removesuffix(".weight") for name in scales)
        theirs = unfolded(theirs, norms, eps)
    weights.save(theirs, path, metadata)


def table_of(model: Any, format: str) -> Table:
    """Return the names and layouts of a model's tensors in the files of a library."""
    forms = _forms(model)
    validate.one_of(
        forms, format=format, remedy=f"{type(model).__name__} has no other format"
    )
    return forms[format].names(model)


def find_weights(source: str | os.PathLike[str]) -> Path:
    """Return the file that weights are in, downloaded if they are on the Hub.

    Takes and raises what `load_weights` does, without reading them.
    """
    source = hub.full_name(source)
    if hub.is_hub_name(source):
        return hub.download_weights(str(source))
    if source in packaged.PACKAGED and not Path(source).exists():
        return packaged.find(str(source))
    path = expanded(source)
    if (path / "ledger.jsonl").exists():
        remedy = "name model.safetensors in it, or model-ema.safetensors, their average"
        validate.refuse("weights", os.fspath(source), "is the folder of a run", remedy)
    if not path.exists():
        remedy = "give a .safetensors or .npz file"
        validate.refuse("weights", os.fspath(source), "is not a file", remedy)
    return file_in(path) if path.is_dir() else path


def _require_head(model: Any) -> None:
    head = getattr(model, "head", None)
    if head is None:
        validate.refuse_type("model", model, "has no head", "head='load'")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(head)):
        rule = "has a head of shapes without values"
        remedy = "create the model, not only its shapes"
        validate.refuse_type("model", model, rule, remedy)


def _forms(model: Any) -> dict[str, Format]:
    def own(model: Any) -> Table:
        return {name: Foreign((name,), SAME) for name in weights.named_tensors(model)}

    return {OWN_FORMAT: Format(own), **FORMATS.get(type(model), {})}


def _unwrapped(
    found: Mapping[str, np.ndarray],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return tensors without the prefixes of wrappers, and what stands against it."""
    bare: dict[str, str] = {}
    for name in found:
        other = bare.setdefault(_WRAPPERS.sub("", name), name)
        if other != name:
            both = f"{clean(other)} and {clean(name)}"
            return {}, [f"{both} are one name without prefixes: leave one of them out"]
    return {name: found[wrapped] for name, wrapped in bare.items()}, []


def _recognise(
    model: Any, found: Mapping[str, np.ndarray], source: Any
) -> tuple[str, Table, Format, dict[str, np.ndarray], list[str]]:
    """Return the format that shares most names with the file, and what it is read with.

    That is its table, the tensors under its names, and refusals: a table refuses a
    model that computes something else from the same weights.
    """
    bare, refusals = _unwrapped(found)
    best, best_share, best_table, tensors = OWN_FORMAT, 0.0, {}, dict(found)
    forms = _forms(model)
    for name, form in forms.items():
        try:
            table = form.names(model)
        except ValueError as error:
            refusals.append(f"not read as {name}: {error}")
            continue
        theirs = [part for tensor in table.values() for part in tensor.names]
        for candidate in (found, bare):
            share = sum(part in candidate for part in theirs) / len(theirs)
            if share > best_share:
                best, best_share, best_table = name, share, table
                tensors = dict(candidate)
    if not best_share:
        names = sorted(found)
        more = [f"… ({len(names)} tensors)"] if len(names) > 4 else []
        rule = f"hold no tensor of this {type(model).__name__}, under the names of "
        rule += ", ".join(forms)
        held = f"they hold {', '.join(names[:4] + more) or 'nothing'}"
        remedy = "; ".join([held, *refusals, "create the model these weights are of"])
        validate.refuse("weights", os.fspath(source), rule, remedy)
    return best, best_table, forms[best], tensors, refusals


def _fit(
    model: Any,
    ours: Mapping[str, Any],
    found: Mapping[str, np.ndarray],
    table: Table,
    changes: list[str],
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return our arrays by name, and a line for each tensor that does not fit."""
    arrays, lines = {}, []
    cast, kinds = collections.Counter(), collections.defaultdict(list)
    for name, leaf in ours.items():
        if name not in table:
            lines.append(f"missing: {name}, which the other library does not have")
            continue
        tensor = table[name]
        theirs = {part: found[part] for part in tensor.names if part in found}
        unlike = [f"missing: {part}" for part in tensor.names if part not in found]
        unlike = unlike or _unlike(tensor, theirs, leaf, resizable=name == "positions")
        if unlike:
            lines += unlike
            continue
        uncast = [part for part in theirs if not _castable(theirs[part], leaf)]
        for part in uncast:
            kinds[f"{theirs[part].dtype}, must be {leaf.dtype}"].append(part)
        if uncast:
            continue
        cast.update({str(each.dtype) for each in theirs.values()} - {str(leaf.dtype)})
        alike = [each.astype(leaf.dtype, copy=False) for each in theirs.values()]
        array = tensor.to_ours(alike)
        if array.shape != leaf.shape:
            try:
                before, array = len(array), fit_positions(array, model)
            except ValueError as error:
                lines.append(f"differs: {tensor.names[0]}: {error}")
                continue
            changes.append(f"{name} resized from {before} to {len(array)} (bicubic)")
        if not np.isfinite(array).all():
            lines.append(f"not finite: {', '.join(tensor.names)}")
        arrays[name] = array
    for both, parts in kinds.items():
        which = "is" if len(parts) == 1 else f"and {len(parts) - 1} more are"
        lines.append(f"{_DTYPE}: {parts[0]} {which} {both}")
    used = {part for name in ours if name in table for part in table[name].names}
    lines += [f"extra: {part}" for part in sorted(found) if part not in used]
    changes += [f"{n} tensors cast from {dtype}" for dtype, n in cast.items()]
    return arrays, lines


def _unlike(
    tensor: Foreign, theirs: Mapping[str, np.ndarray], leaf: Any, resizable: bool
) -> list[str]:
    """Return a line for each of their arrays of another shape."""
    lines = []
    wanted = tensor.to_theirs(np.broadcast_to(np.float32(0), leaf.shape))
    for (part, array), like in zip(theirs.items(), wanted, strict=True):
        fits = array.shape == like.shape or (
            resizable and array.ndim == like.ndim and array.shape[-1] == like.shape[-1]
        )
        if not fits:
            shapes = f"{list(array.shape)}, must be {list(like.shape)}"
            lines.append(f"differs: {part} is {shapes}")
    return lines


def _castable(array: np.ndarray, leaf: Any) -> bool:
    both = (array.dtype, leaf.dtype)
    return both[0] == both[1] or all(jnp.issubdtype(d, jnp.floating) for d in both)


def _remedy(misfits: list[str], table: Table) -> str:
    heads = [table[name] for name in table if name.startswith(_HEAD)]
    parts = [part for tensor in heads for part in tensor.names]
    of_the_head = tuple(f"{x}: {y}" for x in ("missing", "differs") for y in parts)
    if all(line.startswith(of_the_head) for line in misfits):
        return (
            "give head='fresh' or head='zero' for a head of your own classes, or "
            "create the model with the classes of the weights"
        )
    if all(line.startswith("not finite") for line in misfits):
        return "the file is damaged: download it again"
    kinds = {line.partition(":")[0] for line in misfits}
    if _DTYPE in kinds and "differs" not in kinds:
        return f"take the {FLOATS}"
    if any(line.endswith("running_var") for line in misfits):
        return (
            "these weights are of a network with batch norm, which mixes examples: "
            "take those of a network with group norm or without norms"
        )
    return "create the model these weights are of, by its name, size and channels"
