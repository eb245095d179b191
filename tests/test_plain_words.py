"""The check of phrases that are hard to read, in tools/plain_words.py."""

import importlib.util
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location(
    "plain_words", ROOT / "tools/plain_words.py"
)
assert _spec and _spec.loader
plain_words = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_words)


@pytest.mark.parametrize(
    "place, text",
    [
        ("README.md", "# A page\n\nThe device owes\nnothing to the data.\n"),
        ("src/tanager/loop.py", '"""Train.\n\nThis owes nothing to it.\n"""\n'),
        ("examples/a.py", "# %% [markdown]\n# It owes\n# nothing to anybody.\n"),
        (".github/workflows/test.yml", "# owes nothing to the index\n"),
    ],
)
def test_a_hard_phrase_is_found_with_its_line(tmp_path, place, text):
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (found,) = plain_words.check(tmp_path)
    line = text[: text.index("owes")].count("\n") + 1
    assert found == f"{place}:{line}: 'owes nothing to': write: does not depend on" or (
        found.startswith(f"{place}:{line}: 'owes # nothing to'")
    )


def test_words_that_only_contain_a_phrase_are_fine(tmp_path):
    (tmp_path / "README.md").write_text("There is no such file. The cause is noise.\n")
    assert plain_words.check(tmp_path) == []


def test_code_may_hold_what_a_page_may_not(tmp_path):
    for place in ("src/a.py", "README.md"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("All but for one.\n")
    (found,) = plain_words.check(tmp_path)
    assert found.startswith("README.md:1: 'but for'")


def test_a_sentence_of_more_than_thirty_words_is_found(tmp_path):
    page = tmp_path / "README.md"
    fine, long = " ".join(["word"] * 30) + ".", " ".join(["word"] * 31) + "."
    code = "```python\n" + long + "\n```\n\n| " + long + " |\n"
    page.write_text(f"# A page\n\n{fine} W{fine}\n\n{code}\n- {fine}\n- Some {long}\n")
    (found,) = plain_words.check(tmp_path)
    assert found.startswith("README.md:12: more than 30 words: - Some word word")
