import pytest

from tanager._text import clean, in_bytes


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cat", "cat"),
        ("Größe, 猫, 👩‍🔬, a\u00a0b", "Größe, 猫, 👩‍🔬, a\u00a0b"),
        ("two\nlines\tand\r\nmore", "two lines and  more"),
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("\x9b31m and \x7f", "\ufffd31m and \ufffd"),
        ("abc\u202egnp.exe", "abc\ufffdgnp.exe"),
        ("a\u2028b\u2029c\x85d", "a b c d"),
        ("half a pair \ud800", "half a pair \ufffd"),
        (12, "12"),
    ],
)
def test_what_steers_a_terminal_is_replaced(text, shown):
    assert clean(text) == shown
    assert clean(text).encode()


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (20e6, "19.1 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(size, shown):
    assert in_bytes(size) == shown
