"""What other libraries' files say about the preprocessing of their weights."""

from collections.abc import Callable, Mapping
from typing import Any

from tanager import _validate as validate
from tanager.data.preprocessing import Preprocessing


_RESAMPLE = {"1": "lanczos", "2": "bilinear", "3": "bicubic"}  # Pillow's numbers
_CONVNEXT_WHOLE = 384  # pixels from which transformers does not crop for ConvNeXt


def read(config: Mapping[str, Any]) -> Preprocessing | None:
    """Return the preprocessing that a JSON file describes; None if it describes none.

    It is the ``config.json`` of timm, or of a run or an export of tanager; or
    transformers' ``preprocessor_config.json`` (which puts a crop that is not in the
    middle of whole pixels one pixel higher or further left).
    """
    for name, of in _READERS.items():
        if name in config:
            return of(config)
    return None


def _tanager(config: Mapping[str, Any]) -> Preprocessing | None:
    """Of an export, or of a run."""
    ours = config.get("tanager", config).get("preprocessing")
    return None if ours is None else of_fields(ours)


def of_fields(fields: Mapping[str, Any]) -> Preprocessing:
    """Return what `Preprocessing.to_json` made the fields of."""
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in fields.items()
    }
    return Preprocessing(**values)


def _timm(config: Mapping[str, Any]) -> Preprocessing:
    wanted = config["pretrained_cfg"]
    validate.one_of(("center", "squash"), crop_mode=wanted.get("crop_mode", "center"))
    _, height, width = wanted["input_size"]
    return Preprocessing(
        mean=tuple(wanted["mean"]),
        std=tuple(wanted["std"]),
        size=(height, width),
        interpolation=wanted.get("interpolation", "bilinear"),
        crop=wanted.get("crop_pct", 0.875),
        squash=wanted.get("crop_mode") == "squash",
    )


def _transformers(config: Mapping[str, Any]) -> Preprocessing:
    wanted = dict(config)
    of_255 = abs(wanted.get("rescale_factor", 1 / 255) * 255 - 1) < 1e-6
    if not (wanted.get("do_rescale", True) and of_255):
        rule = "must be 1/255: pixels from 0 to 1"
        validate.refuse("rescale_factor", wanted.get("rescale_factor"), rule)
    if not wanted.get("do_normalize", True):
        wanted |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    before, squash = _sides(wanted["size"])
    if not wanted.get("do_resize", True):
        before, squash = None, False
        if wanted.get("do_center_crop"):
            validate.refuse("do_center_crop", True, "must be false without do_resize")
    size, crop = before, 1.0
    if before is not None and wanted.get("do_center_crop"):
        size, _ = _sides(wanted["crop_size"])
        crop = size[0] / before[0]
    elif before is not None and "crop_pct" in wanted:
        squash = before[0] >= _CONVNEXT_WHOLE
        crop = 1.0 if squash else wanted["crop_pct"]
    resample = str(wanted.get("resample", 2))
    validate.one_of(_RESAMPLE, resample=resample)
    return Preprocessing(
        mean=tuple(wanted["image_mean"]),
        std=tuple(wanted["image_std"]),
        size=size,
        interpolation=_RESAMPLE[resample],
        crop=crop,
        squash=squash,
    )


def _sides(size: Any) -> tuple[tuple[int, int], bool]:
    """Return (height, width), and whether both sides are resized to them at once."""
    if isinstance(size, Mapping) and "height" in size:
        return (size["height"], size["width"]), True
    side = size["shortest_edge"] if isinstance(size, Mapping) else size
    return (side, side), not isinstance(size, Mapping)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Preprocessing | None]] = {
    "tanager": _tanager,
    "pretrained_cfg": _timm,
    "image_mean": _transformers,
    "preprocessing": _tanager,
}
"""By an entry that only this kind of file has."""
