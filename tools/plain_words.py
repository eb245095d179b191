"""Find phrases and sentences that are hard to read.

    python tools/plain_words.py

`make lint` runs it. The list grows: add the phrase that a reader stumbled over.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


ROOT = Path(__file__).parents[1]
CODE = ("src", "tests", "tools", "benchmarks")
PAGES = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")
PAGES += ("Dockerfile", "docs", "examples", "launch", ".github")
EXCEPT = ("plain_words.py", "test_plain_words.py")
KINDS = (".py", ".md", ".yml", ".yaml", ".sbatch", ".sh", "")

EVERYWHERE = {
    "what is no scalar": "check that … is a scalar",
    "as a rule at the price": "usually at the speed",
    "nothing outside of it depends": "say what is covered",
    "cannot be had": "is unavailable, cannot download",
    "broke off": "was interrupted",
    "not memory enough": "not enough memory",
    "rather too high": "biased upwards",
    "no run's": "not of a run",
    "no search's": "not of a search",
    "you answer for": "you are responsible for",
    "who is in the data with": "a person with several images",
    "is not counted here": "is not counted",
    "has no way out": "cannot be returned",
    "are gone on with": "are resumed",
    "takes for granted": "assumes",
    "owes nothing to": "does not depend on",
    "owe nothing to": "do not depend on",
    "keeps to": "obeys, stays in",
    "rides along": "is added",
    "ride along": "are added",
    "by way of": "through",
    "may say nothing": "may be empty",
    "it is they": "they",
    "is told by a device": "a device reports",
    "the same of": "the same for",
    "stands where": "replaces",
    "whose is": "who owns",
    "said aloud": "stated",
}
"""Phrases and what to write instead. A phrase may be a regular expression."""

IN_PAGES = {
    "but for": "except",
    "but that": "except that",
    "of which": "start a new sentence",
    r"(?<!there\s)is no": "is not a, has no",
    r"(?<!there\s)are no": "are not",
    "are none": "there are no",
    "so many": "say how many",
    "as it is": "unchanged",
    "as they are": "unchanged",
    "as there": "as in …",
    "is told": "knows, is stated",
    "are told": "know, are stated",
    "told of": "reported",
    "be had": "is available",
    "go(es)? on with": "continues with",
    "gone on": "continued",
    "ride on": "are added to",
    "hand(s|ed)? on": "publish, pass on",
    "lies? in": "is in",
    "lies? on": "is on",
    "anew": "again",
    "hence": "so",
    "nor has": "and … has none",
    "what comes": "the output",
    "gives? way": "is changed",
    "for nothing": "does not count",
    "of one's own": "your own",
    "are had": "you get",
}
"""Phrases that are gone from pages except design.md, but not from docstrings."""


def findings(text: str, phrases: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and what to write instead, for each hit in a text."""
    for phrase, instead in phrases.items():
        # Words may be on two lines, with the marks of a comment between them.
        spaced = phrase.replace(" ", r"[\s#>]+")
        for match in re.finditer(rf"(?<![\w-])(?:{spaced})(?!\w)", text, re.I):
            line = text.count("\n", 0, match.start()) + 1
            yield line, " ".join(match[0].split()), instead


def files(root: Path, places: tuple[str, ...]) -> Iterator[Path]:
    """Yield the texts in these files and folders."""
    for place in (root / each for each in places):
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            hidden = {"_build", "__pycache__", "notebooks"} & set(path.parts)
            if path.is_file() and path.suffix in KINDS and not hidden:
                yield path


LONGEST = 30
SHORT = ("README.md", "docs/index.md", "docs/start.md")
SHORT += ("docs/training.md", "docs/threat_model.md")
"""Pages in which no sentence has more words than that."""

_NOT_PROSE = re.compile(
    r"^```.*?^```$|^\|.*?$|<!--.*?-->|\(?`tests/[^`]*`[,;)]?|\]\([^)]*\)", re.S | re.M
)
_PARAGRAPH = re.compile(r"\S.*?(?=\n\s*\n|\n\s*(?:[-*]|\d+\.) |\Z)", re.S)
_END = re.compile(r"(?<=[.!?:;])\*{0,2}\s+(?=[^a-z\s])")


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line of a paragraph and each sentence in it that is too long."""
    prose = _NOT_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for paragraph in _PARAGRAPH.finditer(prose):
        for sentence in _END.split(paragraph[0]):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > LONGEST:
                line = prose.count("\n", 0, paragraph.start()) + 1
                yield line, " ".join(sentence.split())


def check(root: Path = ROOT) -> list[str]:
    """Return one line for each phrase and sentence in the project that is hard."""
    found = []
    for places, phrases in ((CODE + PAGES, EVERYWHERE), (PAGES, IN_PAGES)):
        for path in files(root, places):
            plan = phrases is IN_PAGES and path.name == "design.md"
            if path.name in EXCEPT or plan:
                continue
            text = path.read_text(encoding="utf-8")
            found += [
                f"{path.relative_to(root)}:{line}: {words!r}: write: {instead}"
                for line, words, instead in findings(text, phrases)
            ]
    for path in files(root, SHORT):
        found += [
            f"{path.relative_to(root)}:{line}: more than {LONGEST} words: {sentence}"
            for line, sentence in long_sentences(path.read_text(encoding="utf-8"))
        ]
    return found


if __name__ == "__main__":
    lines = check()
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)
