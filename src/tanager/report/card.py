"""The model card of a run: the README.md of an exported model.

It is as the Hugging Face Hub reads it: a YAML head for machines, Markdown for people.
It is made of the run's public files only, and says nothing of the machine: no path.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from tanager._text import clean
from tanager.privacy.mechanism import LARGE_EPSILON
from tanager.privacy.shown import upper
from tanager.report import guarantee
from tanager.report.guarantee import number, percent, text


UNKNOWN_LICENCE = "unknown"

_Fields = Mapping[str, Any]

_OF_THIS_MACHINE = {"data", "out", "seed"}
_WEIGHTS = {
    "average": "the exponential moving average of the parameters",
    "last": "the parameters after the last update",
}


def model_card(
    config: _Fields,
    result: _Fields,
    *,
    weights: str,
    format: str,
    licence: str | None,
    timm_name: str | None = None,
) -> str:
    """Return the model card of a finished run.

    Args:
        config: of the run's config.json.
        result: of its result.json.
        weights: which of the run's were exported, ``"average"`` or ``"last"``.
        format: of the exported tensors.
        licence: an identifier such as ``apache-2.0``; None says it is unknown.
        timm_name: of the architecture, where timm has it.
    """
    name = f"{config.get('model') or 'a model'} on {config.get('dataset') or 'data'}"
    name = clean(name)
    accuracy = result.get(
        "test_accuracy_ema" if weights == "average" else "test_accuracy"
    )
    head = _head(config, result, name, licence, accuracy, format)
    parts = [
        f"# {_plain(name)}",
        _guarantee(result),
        _section("Use", _use(config, format, timm_name)),
        _section("Accuracy", _accuracy(result, weights, accuracy)),
        _section("Training", _training(config, result, weights)),
        _section("Data", _data(config, result)),
        _section("Limits", _limits(config, result, weights)),
        _section("Licence", _licence(config, licence)),
        _section("How to verify", _verification(result)),
    ]
    return f"---\n{head}---\n\n" + "\n\n".join(parts) + "\n"


def _head(
    config: _Fields,
    result: _Fields,
    name: str,
    licence: str | None,
    accuracy: float | None,
    format: str,
) -> str:
    private = ["differential-privacy", "dp-sgd"] if result["private"] else []
    fields: dict[str, Any] = {
        "license": licence or UNKNOWN_LICENCE,
        "library_name": format,
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "tanager", *private],
    }
    base = (config.get("weights") or {}).get("weights", "")
    if base.startswith("hf:"):
        fields["base_model"] = clean(re.split("[@:]", base.removeprefix("hf:"))[0])
    if accuracy is not None:
        dataset = clean(config.get("dataset") or "data")
        fields["model-index"] = [
            {
                "name": name,
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"type": dataset, "name": dataset, "split": "test"},
                        "metrics": [{"type": "accuracy", "value": accuracy}],
                    }
                ],
            }
        ]
    # JSON is YAML, and needs no quoting rules of its own.
    return "".join(
        f"{key}: {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in fields.items()
    )


### The guarantee


def _guarantee(result: _Fields) -> str:
    if not result["private"]:
        return _section(
            "NOT PRIVATE",
            "**This model has no differential privacy guarantee.** "
            f"{guarantee.reason_against(result)} Do not release it if the data are "
            f"private.\n\n{guarantee.mechanism(result)}",
        )
    text = (
        f"**This model is {guarantee.claim(result)}-differentially private under "
        f"{result['adjacency']}.**"
    )
    if result["epsilon"] >= LARGE_EPSILON:
        text += (
            " An ε this large protects next to nothing: right for a simulation on "
            "public data, wrong for a model of private data."
        )
    rdp = result.get("epsilon_rdp")
    beside = f"by RDP, as papers report it: {'none' if rdp is None else upper(rdp)}"
    if result.get("search"):
        beside = "of the whole search"
    rows = {
        "ε": f"{upper(result['epsilon'])} ({beside})",
        "δ": number(result["delta"]),
        "adjacency": result["adjacency"],
        "unit of privacy": "one example, which is one image",
        "accountant": str(result["accountant"]).upper(),
        "mechanism": "DP-SGD: Poisson subsampling, clipping, Gaussian noise",
        "sample rate q": number(result["sample_rate"]),
        "noise multiplier σ": number(result["noise_multiplier"]),
        "clipping norm C": number(result["clip_norm"]),
        "updates": f"{result['steps']:,}",
    }
    rests = "\n".join(f"- {sentence}" for sentence in guarantee.assumptions(result))
    return _section(
        "Guarantee",
        f"{text}\n\n{_table(rows)}\n\n{guarantee.mechanism(result)} "
        f"{_plain(guarantee.accounting(result))}\n\n"
        f"What it rests on, and what it does not protect:\n\n{rests}",
    )


def _verification(result: _Fields) -> str:
    claimed = upper(result["epsilon"])
    lead = f"Compute ε (here {claimed}) again from the mechanism, without tanager:"
    if not result["private"]:
        lead = (
            "What these settings would spend with noise from a secret seed; this model "
            "must not claim it:"
        )
    if not result["noise_multiplier"]:
        return "There is nothing to verify: no noise was added."
    return f"{lead}\n\n{_code(guarantee.recomputation(result))}"


### The rest


def _use(config: _Fields, format: str, timm_name: str | None) -> str:
    if not config.get("architecture"):
        return (
            "The architecture is its author's own code. `model.safetensors` holds its "
            "tensors; `tanager.models.weights.load(model, 'model.safetensors')` loads "
            "them into that model."
        )
    own = _code(
        "from tanager import models\n"
        "\n"
        'trained = models.load_pretrained("FOLDER")  # or "hf:OWNER/REPOSITORY"\n'
        "logits = trained(image)  # one image, uint8[H, W, C]\n"
        "print(trained.classes[int(logits.argmax())])"
    )
    if format != "timm":
        return own
    theirs = _code(
        "import timm\n\n"
        'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()'
    )
    return f"In timm, where it is a `{timm_name}`:\n\n{theirs}\n\nIn tanager:\n\n{own}"


def _accuracy(result: _Fields, weights: str, accuracy: float | None) -> str:
    if search := result.get("search"):
        return (
            f"On {text(search['held_out_examples'])} held-out examples, by the average "
            "of the parameters, with noise that protects the examples: "
            f"**{percent(search['noisy_accuracy'])}**. The noise has a standard "
            f"deviation of {number(search['score_noise'])} examples, and the best of "
            "several is biased upwards."
        )
    if accuracy is None:
        return "It was not measured: there was no test set."
    whole = f"On the test set: **{percent(accuracy)}**."
    classes = result.get("per_class")
    if not classes:
        return whole
    key = "accuracy_ema" if weights == "average" else "accuracy"
    rows = "\n".join(
        f"| {_plain(each['class'])} | {each['examples']:,} | {percent(each[key])} |"
        for each in classes
    )
    return (
        f"{whole}\n\n| class | test examples | accuracy |\n| --- | --- | --- |\n{rows}"
    )


def _training(config: _Fields, result: _Fields, weights: str) -> str:
    rows: dict[str, Any] = {
        "model": config.get("model"),
        "parameters trained": config.get("parameters"),
        "weights exported": _WEIGHTS[weights],
        "initial weights": _initial(config),
        "optimizer": config.get("optimizer"),
        "updates": result["steps"],
        "expected batch size": result["batch_size"],
        **{
            f"recipe: {name}": "a path, left out" if _has_path(value) else value
            for name, value in (config.get("recipe") or {}).items()
            if name not in _OF_THIS_MACHINE
        },
        **(result.get("versions") or {}),
    }
    return _table({name: rows[name] for name in rows if rows[name] is not None})


def _initial(config: _Fields) -> str | None:
    origin = config.get("weights")
    if not origin:
        return "drawn at random" if config.get("architecture") else None
    text = f"{origin['weights']} (sha256 {origin['sha256']})"
    return "; ".join([text, *origin["changes"]])


def _data(config: _Fields, result: _Fields) -> str:
    classes = config.get("classes") or ()
    scale = config.get("preprocessing") or {}
    shape = (config.get("architecture") or {}).get("image_shape")
    before = config.get("resized_from")
    rows = {
        "data set": config.get("dataset"),
        "training examples": result["examples"],
        "classes": [str(name) for name in classes] or None,
        "image (height, width, channels)": shape,
        "resized from": before if before != shape else None,
        "pixels": "(image / 255 − mean) / std" if scale else None,
        "mean": scale.get("mean"),
        "std": scale.get("std"),
    }
    return _table({name: rows[name] for name in rows if rows[name] is not None})


def _limits(config: _Fields, result: _Fields, weights: str) -> str:
    shape = (config.get("architecture") or {}).get("image_shape")
    lines = [
        "It was measured on images of its own origin only; those of another may fare "
        "otherwise.",
        "Privacy is often paid for by small or unusual classes.",
    ]
    key = "accuracy_ema" if weights == "average" else "accuracy"
    measured = [each for each in result.get("per_class") or () if each[key] is not None]
    if measured:
        worst = min(measured, key=lambda each: each[key])
        lines[1] += (
            f" Here the lowest accuracy is that of {_plain(worst['class'])}: "
            f"{percent(worst[key])}."
        )
    if shape:
        size = " × ".join(map(str, shape))
        lines.append(f"It was trained on images of {size} (height, width, channels).")
    lines.append(
        "Training on it further, or on its outputs, with the same private data spends "
        "privacy that is not in the figure above."
    )
    return "\n".join(f"- {line}" for line in lines)


def _licence(config: _Fields, licence: str | None) -> str:
    if licence:
        text = f"{_plain(licence)}, as stated by who exported it."
    else:
        text = (
            "**Unknown**: nobody stated one. Without a licence nobody but its owner "
            "may use this model."
        )
    if config.get("weights"):
        text += (
            f" It was trained from {_plain(config['weights']['weights'])}, whose own "
            "licence holds too."
        )
    return text


### Text


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n{content}"


def _code(program: str) -> str:
    return f"```python\n{program}\n```"


def _table(rows: _Fields) -> str:
    lines = [f"| {_plain(name)} | {_plain(text(rows[name]))} |" for name in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _plain(text: object) -> str:
    """Return text that no Markdown or control character hides in, on one line."""
    one_line = " ".join(clean(text).split())
    return re.sub(r"([\\`*\[\]<>|#])", r"\\\1", one_line)


def _has_path(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_path, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_path, value))
    is_name = isinstance(value, str) and not value.startswith("hf:")
    return is_name and re.search(r"[/\\~]", value) is not None
