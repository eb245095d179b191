"""`tanager audit`: attack the real training code, and bound its ε from below."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tanager import _validate as validate
from tanager._files import write_json
from tanager._heap import run_in_place
from tanager._reading import read_json
from tanager._terminal import new_console
from tanager._text import clean
from tanager.commands import accounts, flags
from tanager.commands.audit.options import Options
from tanager.commands.tables import print_json


def run(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `tanager audit`.

    Returns:
        1 where a bound is above the claim, or a check of a replay fails; else 0.
    """
    entry, recipe, options = flags.parse("audit", arguments, Options)
    name = entry.name
    if recipe.non_private:
        rule = "has no guarantee to audit"
        validate.refuse("non_private", True, rule, "leave it out")
    recipe.refuse_balanced("in an audit, which attacks the updates alone")
    if recipe.multi_label and options.method in ("membership", "one-run"):
        rule = f"must be left out of {options.method}, whose canaries have one class"
        validate.refuse("multi_label", True, rule, "give --method white-box or replay")

    # JAX is imported from here on: the command line was fine.
    from tanager.commands.audit import methods
    from tanager.recipes import runner
    from tanager.report import audit_page
    from tanager.training.precision import computing
    from tanager.training.run_folder import refuse_foreign, removed_if_refused

    run_in_place()
    out = Path(recipe.out or f"runs/{name}-audit")
    _refuse_a_run(out)
    refuse_foreign(out, _OWN)
    runner.require_apart(recipe, out)
    attack = {
        "white-box": methods.white_box,
        "membership": methods.membership,
        "one-run": methods.one_run,
        "replay": methods.replayed,
    }[options.method]
    with computing(recipe.precision), removed_if_refused(out, out / "run"):
        found = attack(name, recipe, options, out)
    content: dict[str, Any] = {"recipe": name, "method": options.method, **found}
    if options.method == "replay":
        return _replayed(content, out, options.json)
    content = {"sentence": audit_page.sentence(content), **content}
    content["account"] = accounts.total_of(recipe, content["delta"])
    write_json(out / "audit.json", content)
    page = audit_page.write_report(out, content)
    if options.json:
        print_json(content)
    else:
        _print(content, page, accounts.sentence(recipe, content["account"]))
    return int(content["violated"])


_OWN = ("audit.json", "replay.json", "run", "private")


def _refuse_a_run(out: Path) -> None:
    for name in ("ledger.jsonl", "study.json", "config.json"):
        if not (out / name).exists():
            continue
        with contextlib.suppress(ValueError):
            if "rounds" in read_json(out / name):  # of membership
                continue
        what = f"a run or a search ({name}), whose report would be overwritten"
        validate.refuse("out", str(out), f"holds {what}", "choose another folder")


def _print(content: dict[str, Any], page: Path, charged: str) -> None:
    from tanager.report import audit_page

    console = new_console(markup=False)
    console.print(content["sentence"])
    if content["violated"]:
        console.print(
            "VIOLATED: the lower bound is above the claimed ε. Training leaks more "
            "than it claims, or this audit is one of the few that err (see its "
            "confidence): repeat it with another seed",
            style="bold red",
        )
    else:
        console.print("nothing contradicts the claimed ε")
    console.print(audit_page.advantages(content))
    console.print(f"{charged}report: {clean(page)}", soft_wrap=True)


def _replayed(content: dict[str, Any], out: Path, as_json: bool) -> int:
    write_json(out / "replay.json", content, mode=0o600)
    failed = int(not content["passed"])
    if as_json:
        return print_json(content) or failed
    table = Table("check", "", "seen", box=None)
    for finding in content["checks"]:
        passed = finding["passed"]
        verdict = "[green]passed[/]" if passed else "[bold red]FAILED[/]"
        table.add_row(finding["check"], verdict, finding["detail"])
    console = new_console()
    console.print(table)
    console.print(
        "these findings, in replay.json too, have no noise and no ε covers them: do "
        "not publish them if the data are private"
    )
    where = f"report: {clean(out / 'replay.json')}"
    console.print(where, soft_wrap=True, markup=False)
    return failed
