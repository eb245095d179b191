"""What the tables of NF-ResNets and NFNets have in common: timm's NormFreeNet."""

from collections.abc import Iterator, Sequence
from typing import Any

from tanager.models.foreign.layouts import CONV, GAIN, SAME, Foreign, Layout


def convolution(ours: str, theirs: str, *, gain: Layout = GAIN) -> dict[str, Foreign]:
    """Return the three tensors of a standardised convolution."""
    return {
        f"{ours}.weight": Foreign(f"{theirs}.weight", CONV),
        f"{ours}.gain": Foreign(f"{theirs}.gain", gain),
        f"{ours}.bias": Foreign(f"{theirs}.bias", SAME),
    }


def blocks(model: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield every block, its name and its name in timm, where stages count anew."""
    stage = place = -1
    for number, block in enumerate(model.blocks):
        starts = block.shortcut is not None
        stage, place = (stage + 1, 0) if starts else (stage, place + 1)
        yield block, f"blocks.{number}", f"stages.{stage}.{place}"


def block(
    block: Any, ours: str, theirs: str, convolutions: Sequence[str]
) -> dict[str, Foreign]:
    """Return a block's convolutions (named alike) and its skip gain."""
    names = {}
    for conv in convolutions:
        names |= convolution(f"{ours}.{conv}", f"{theirs}.{conv}")
    if block.shortcut is not None:
        names |= convolution(f"{ours}.shortcut", f"{theirs}.downsample.conv")
    if block.skip_gain is not None:
        names[f"{ours}.skip_gain"] = Foreign(f"{theirs}.skipinit_gain", SAME)
    return names
