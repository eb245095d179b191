"""`tanager export`: write a finished run's model and model card into a folder."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

from tanager._text import clean
from tanager.commands import flags
from tanager.commands.tables import print_json


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write a finished run's model into a folder: weights, config.json, model card.

    Only the run's public files are read: no private/, no seed, no path.
    """

    run: tyro.conf.Positional[pathlib.Path]
    """Folder of a finished run."""

    to: pathlib.Path
    """Folder to create; it must be missing or empty."""

    format: Annotated[str, tyro.conf.arg(metavar="{tanager,timm,onnx}")] = "tanager"
    """How tensors are named and laid out (tanager loads both), or an ONNX file."""

    weights: Annotated[str, tyro.conf.arg(metavar="{average,last}")] = "average"
    """Average of the parameters, or the parameters after the last update."""

    licence: str | None = None
    """Licence of the model, such as apache-2.0. Default: stated as unknown."""

    json: flags.Json = False


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "export", arguments)

    # JAX is imported from here on: the command line was fine.
    from tanager._reading import read_json
    from tanager.training.export import export

    folder = export(
        options.run,
        options.to,
        weights=options.weights,
        format=options.format,
        licence=options.licence,
    )
    described = read_json(folder / "config.json")
    guarantee = described["tanager"]["guarantee"]
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    if options.json:
        record = {
            "folder": str(folder),
            "format": options.format,
            "weights": options.weights,
            "licence": options.licence,
            "guarantee": guarantee,
            "files": files,
        }
        return print_json(record)
    kind = "" if guarantee["private"] else "NOT PRIVATE: "
    print(f"{kind}weights written to {clean(folder)}")
    for name, size in files.items():
        print(f"  {name:<20}{size:>14,} bytes")
    if options.licence is None:
        print("licence: unknown, as the model card says; --licence states one")
    return 0
