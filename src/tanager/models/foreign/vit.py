"""Vision transformers: the tensors of timm and of Hugging Face transformers."""

from tanager.models.foreign.layouts import (
    CONV,
    FIRST_AXIS,
    FIRST_TWO_AXES,
    LINEAR,
    SAME,
    Foreign,
    Joined,
    Layout,
)
from tanager.models.vit import VisionTransformer


def timm_names(model: VisionTransformer) -> dict[str, Foreign]:
    """Return what each tensor is in timm's `VisionTransformer`.

    Theirs has a class token, a last norm before the head and no layer scale, as the
    checkpoints named ``vit_*_patch*`` of timm's augreg, orig and deit families do.
    """
    table = {
        "patches.weight": Foreign("patch_embed.proj.weight", CONV),
        "patches.bias": Foreign("patch_embed.proj.bias", SAME),
        "class_token": Foreign("cls_token", FIRST_TWO_AXES),
        "positions": Foreign("pos_embed", FIRST_AXIS),
        **_norm("norm", "norm"),
        **_linear("head", "head"),
    }
    for index in range(len(model.blocks)):
        block = f"blocks.{index}"
        table |= {
            **_norm(f"{block}.norm1", f"{block}.norm1"),
            **_linear(f"{block}.attention.qkv", f"{block}.attn.qkv"),
            **_linear(f"{block}.attention.projection", f"{block}.attn.proj"),
            **_norm(f"{block}.norm2", f"{block}.norm2"),
            **_linear(f"{block}.expand", f"{block}.mlp.fc1"),
            **_linear(f"{block}.contract", f"{block}.mlp.fc2"),
        }
    return table


def hf_names(
    model: VisionTransformer, prefix: str = "vit."
) -> dict[str, Foreign | Joined]:
    """Return what each tensor is in transformers' `ViTForImageClassification`.

    Queries, keys and values are three tensors there. Its layer norms add 1e-12 to the
    variance unless configured otherwise, ours 1e-6 (see `docs/weights.md` for what
    that does to the logits).

    Args:
        model: whose tensors.
        prefix: of all names but the head's; none in files of a bare `ViTModel`.
    """
    table: dict[str, Foreign | Joined] = {
        "patches.weight": Foreign(
            f"{prefix}embeddings.patch_embeddings.projection.weight", CONV
        ),
        "patches.bias": Foreign(
            f"{prefix}embeddings.patch_embeddings.projection.bias", SAME
        ),
        "class_token": Foreign(f"{prefix}embeddings.cls_token", FIRST_TWO_AXES),
        "positions": Foreign(f"{prefix}embeddings.position_embeddings", FIRST_AXIS),
        **_norm("norm", f"{prefix}layernorm"),
        **_linear("head", "classifier"),
    }
    for index in range(len(model.blocks)):
        block, layer = f"blocks.{index}", f"{prefix}encoder.layer.{index}"
        attention = f"{layer}.attention.attention"
        table |= {
            **_norm(f"{block}.norm1", f"{layer}.layernorm_before"),
            f"{block}.attention.qkv.weight": _joined(attention, "weight", LINEAR, 1),
            f"{block}.attention.qkv.bias": _joined(attention, "bias", SAME, 0),
            **_linear(
                f"{block}.attention.projection", f"{layer}.attention.output.dense"
            ),
            **_norm(f"{block}.norm2", f"{layer}.layernorm_after"),
            **_linear(f"{block}.expand", f"{layer}.intermediate.dense"),
            **_linear(f"{block}.contract", f"{layer}.output.dense"),
        }
    return table


def _joined(attention: str, kind: str, layout: Layout, axis: int) -> Joined:
    names = tuple(f"{attention}.{part}.{kind}" for part in ("query", "key", "value"))
    return Joined(names, layout, axis)


def _linear(ours: str, theirs: str) -> dict[str, Foreign]:
    return {
        f"{ours}.weight": Foreign(f"{theirs}.weight", LINEAR),
        f"{ours}.bias": Foreign(f"{theirs}.bias", SAME),
    }


def _norm(ours: str, theirs: str) -> dict[str, Foreign]:
    return {
        f"{ours}.scale": Foreign(f"{theirs}.weight", SAME),
        f"{ours}.bias": Foreign(f"{theirs}.bias", SAME),
    }
