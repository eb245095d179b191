"""The frame of a page that stands alone: its head and its style."""

import html

from tanager._text import clean


_STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d4d9df;
  --panel: #f5f7f9; --raw: #b35900; --average: #0b62a8; --epsilon: #7a3fa8;
  --safe: #1a7f4b; --danger: #b00020; --danger-paper: #fde8ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171b; --ink: #e6e9ed; --soft: #9aa4af; --line: #3a424b;
    --panel: #1d2227; --raw: #f0a04b; --average: #6cb6ff; --epsilon: #c79bf0;
    --safe: #4cc38a; --danger: #ff6b7d; --danger-paper: #3a1218;
  }
}
@media print {
  :root {
    color-scheme: light;
    --paper: #ffffff; --ink: #000000; --soft: #444444; --line: #bbbbbb;
    --panel: #ffffff; --raw: #b35900; --average: #0b62a8; --epsilon: #7a3fa8;
    --safe: #1a7f4b; --danger: #b00020; --danger-paper: #ffffff;
  }
  body { max-width: none; padding: 0; }
  figure, tr, .guarantee, .danger { break-inside: avoid; }
  h2 { break-after: avoid; }
  .bar, .bar i { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 56rem; padding: 2rem 1.25rem 4rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word;
}
h1 { margin: 0 0 1.25rem; font-size: 1.7rem; line-height: 1.2; }
h2 { margin: 2.25rem 0 .6rem; font-size: 1.15rem; }
.kind { margin: 0; color: var(--soft); }
.guarantee, .danger { padding: .25rem 1.25rem .75rem; border-radius: .5rem; }
.guarantee { background: var(--panel); border-left: .4rem solid var(--safe); }
.danger { background: var(--danger-paper); border: .25rem solid var(--danger); }
.guarantee h2, .danger h2 { margin-top: .75rem; }
.danger h2 { color: var(--danger); font-size: 1.9rem; }
.claim { font-size: 1.15rem; }
li { margin: .2rem 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0 0; }
.tiles div {
  flex: 1 1 9rem; padding: .6rem .9rem; background: var(--panel);
  border: 1px solid var(--line); border-radius: .5rem;
}
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
.white { padding: .5rem; background: #ffffff; border-radius: .5rem; }
.white figcaption { color: #57606a; }
figcaption { color: var(--soft); font-size: .9rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td {
  padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top; font-weight: normal;
}
tbody th { width: 45%; color: var(--soft); }
thead th { font-weight: 600; }
.classes tbody th { width: auto; color: var(--ink); }
.bar {
  display: inline-block; width: 6rem; height: .6rem; background: var(--line);
  border-radius: .3rem; overflow: hidden;
}
.bar i { display: block; height: 100%; }
i.raw { background: var(--raw); }
i.average { background: var(--average); }
pre {
  padding: .8rem 1rem; background: var(--panel); border-radius: .5rem;
  overflow-x: auto; font-size: .85rem;
}
summary { margin-top: .75rem; cursor: pointer; }
"""


def escape(text: object) -> str:
    """Return text as HTML that shows it, without control characters."""
    return html.escape(clean(text))


def standalone(title: str, body: str) -> str:
    """Return a whole page; its policy lets a browser load nothing from elsewhere.

    Args:
        title: plain text.
        body: HTML, with all text escaped already.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )
