"""Templates: every value is escaped, and a missing one is an error."""

import pytest
from jinja2 import UndefinedError

from tanager.report.render import plain, render


EVIL = "<script>x</script>\n# head\x1b[2J\u202e|`*"


def test_a_page_escapes_its_values():
    page = render("base.html", kind=EVIL, subject=EVIL)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\x1b" not in page and "\u202e" not in page


def test_markdown_loses_its_meaning_and_its_lines():
    assert plain(EVIL) == r"\<script\>x\</script\> \# head" + "�" + r"\[2J�\|\`\*"
    assert plain("a\r\n---\r\nb") == "a --- b"


def test_a_value_that_is_forgotten_is_an_error():
    with pytest.raises(UndefinedError, match="subject"):
        render("base.html", kind="a report")
