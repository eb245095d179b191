"""`tanager search norms`: the gradient norms of a run. They are private."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from tanager._terminal import new_console
from tanager.commands import flags
from tanager.commands.tables import new_table, print_json, print_table
from tanager.report import figures, search_figures


@dataclasses.dataclass(frozen=True)
class NormsArguments:
    """Show the gradient norms of a run, in parts of training.

    They are PRIVATE: computed from the training examples without noise.
    """

    run: Positional[str]
    """Folder of the run, with its private/."""

    parts: int = 4
    """Number of equal parts of the steps."""

    plot: Path | None = None
    """Draw histograms as a PNG or SVG file."""

    json: flags.Json = False


def run(words: Sequence[str]) -> int:
    options = flags.read(NormsArguments, "search norms", words)

    # JAX is imported from here on: the command line was fine.
    from tanager.training.norms import Norms, edges

    if options.plot is not None:
        figures.check_ending(options.plot)
    found = Norms.read(options.run, options.parts)
    bins, counts = edges().tolist(), found.counts.tolist()
    if options.plot is not None:
        search_figures.plot_norms(
            bins, counts, found.steps, found.clip_norm, options.plot
        )
    quantiles = {share: found.quantile(share) for share in (0.1, 0.25, 0.5, 0.75, 0.9)}
    suggested = min(1.0, quantiles[0.5])
    if options.json:
        content = {
            "private": "computed from the training examples without noise",
            "clip_norm": found.clip_norm,
            "steps": found.steps,
            "clipped": found.clipped(),
            "quantiles": {str(share): norm for share, norm in quantiles.items()},
            "suggested_clip_norm": suggested,
            "mean_square": found.mean_square(),
            "edges": bins,
            "counts": counts,
        }
        return print_json(content)
    console = new_console(markup=False)
    console.print("PRIVATE: computed from the training examples; not to be released")
    shares = zip(found.steps, found.clipped(), strict=True)
    headings = ("until step", f"norms above C = {found.clip_norm:g}")
    rows = [(f"{step}", f"{100 * share:.0f} %") for step, share in shares]
    print_table(new_table(*headings, texts=headings, rows=rows))
    middle = " ".join(f"{100 * s:g} %: {norm:.3g}" for s, norm in quantiles.items())
    console.print(f"quantiles of the norm  {middle}")
    why = "as in the Unlocking paper"
    if suggested < 1:
        why = "the median: the Unlocking paper's 1 would leave most norms as they are"
    console.print(
        f"a clipping norm to try: {suggested:.3g}, {why}; those below "
        f"{quantiles[0.1]:.3g} train alike at one learning rate, as that paper found",
        soft_wrap=True,
    )
    console.print(
        f"drawing a batch of B examples at random adds {found.mean_square():.3g}·B·C² "
        "to the variance of their clipped sum; at most B·C²",
        soft_wrap=True,
    )
    if options.plot is not None:
        console.print(f"drawn to {options.plot}", soft_wrap=True)
    return 0
