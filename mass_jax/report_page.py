"""The HTML of a report: escaping by type, tables, figures, one stylesheet.

Text becomes `Html` only by being escaped (`text`) or by being written in this package, so
what a file says can never become markup. The page asks for nothing from the network, and
its content security policy forbids every script but the one it was made with, if any.
"""

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --paper: #fff; --card: #f4f5f7;
  --line: #d4d7dc; --link: #005a9c; --shadow: #0005; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #b4b8be; --paper: #16181b; --card: #22252a; --line: #3b4048;
    --link: #8cc8ff; --shadow: #fff6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p, dd, figcaption { overflow-wrap: anywhere; }
p { max-width: 46rem; }
a { color: var(--link); }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em;
  overflow-wrap: anywhere; }
.soft, figcaption { color: var(--soft); font-size: .92rem; }
.cards { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr));
  padding: 0; margin: 1rem 0; list-style: none; }
.cards li { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.45rem; line-height: 1.3;
  font-variant-numeric: tabular-nums; }
.cards span { display: block; color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.figures { display: grid; gap: 1.25rem 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; }
figure > img { display: block; width: 100%; height: auto; background: #fff; border-radius: .4rem;
  border: 1px solid var(--line); padding: .25rem; }
.mistakes { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, 6.6rem); }
.mistakes img { width: 100%; image-rendering: pixelated; padding: 0; background: #000; }
.mistakes figcaption { font-size: .82rem; line-height: 1.35; }
.scroll { overflow-x: auto; margin: .75rem 0;
  /* A shadow at each edge that hides more; covers that scroll along hide it at the ends. */
  background: linear-gradient(to right, var(--paper) 40%, transparent) left / 2.5rem 100% local,
    linear-gradient(to left, var(--paper) 40%, transparent) right / 2.5rem 100% local,
    linear-gradient(to right, var(--shadow), transparent) left / .9rem 100% scroll,
    linear-gradient(to left, var(--shadow), transparent) right / .9rem 100% scroll, var(--paper);
  background-repeat: no-repeat; }
pre { background: var(--card); border-radius: .4rem; padding: .5rem .75rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td:not(.number) { overflow-wrap: anywhere; min-width: 5rem; }
td:last-child:not(.number) { min-width: 11rem; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
dt { font-weight: 600; margin-top: .6rem; }
dd { margin: 0; max-width: 46rem; }
summary { cursor: pointer; padding: .3rem 0; }
@media (max-width: 30rem) {
  table { font-size: .85rem; }
  th, td { padding-right: .5rem; } }
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #333; --paper: #fff; --card: #fff;
    --line: #bbb; --link: #000; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; }
  figure, .cards li, tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .scroll { overflow: visible; background: none; } }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Html(str):
    """Markup that may enter the page as it is."""


def text(value: object) -> Html:
    """Any value as text, escaped; `Html` stays what it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def joined(parts: Iterable[object]) -> Html:
    """Parts one after the other, each escaped unless it is `Html`."""
    return Html("\n".join(text(part) for part in parts))


def element(tag: str, content: object, **attributes: object) -> Html:
    """``<tag attributes>content</tag>``; an underscore ends names that Python reserves.

    Example:
      >>> element("p", "1 < 2", class_="soft")
      '<p class="soft">1 &lt; 2</p>'
    """
    listed = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
    )
    return Html(f"<{tag}{listed}>{text(content)}</{tag}>")


def table(label: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls in its own box; numbers (and what is formatted as one) to the right.

    Args:
      label: what a screen reader calls it.
      header: of the columns.
      rows: cells, the first of each the name of its row.
    """
    made = [[cell if isinstance(cell, Html) else text(cell) for cell in row] for row in rows]
    numeric = [
        len(made) > 0 and column > 0 and all(_is_number(row[column]) for row in made)
        for column in range(len(header))
    ]
    kind = lambda column: {"class_": "number"} if numeric[column] else {}
    head = joined(element("th", h, scope="col", **kind(i)) for i, h in enumerate(header))
    body = [
        element(
            "tr",
            joined(
                element("th", cell, scope="row") if i == 0 else element("td", cell, **kind(i))
                for i, cell in enumerate(row)
            ),
        )
        for row in made
    ]
    content = joined(
        [element("thead", element("tr", head)), element("tbody", joined(body))],
    )
    # Focusable, so that the keyboard can scroll it too.
    return element(
        "div", element("table", content), class_="scroll", tabindex=0, role="region",
        aria_label=label,
    )  # fmt: skip


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return False
    return True


def picture(png: bytes, alt: str, caption: object = "") -> Html:
    """A figure whose image is in the page itself.

    Args:
      png: the bytes of the image.
      alt: what it shows, for who cannot see it.
      caption: below it.
    """
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = Html(f'<img src="{source}" alt="{text(alt)}">')
    below = element("figcaption", caption) if caption else Html("")
    return element("figure", joined([image, below]))


def page(title: str, body: Iterable[object], style: str = "", script: str = "") -> str:
    """The whole document.

    Args:
      title: of the window.
      body: its parts, one after the other.
      style: added to the common stylesheet.
      script: the only one that may run, known to the browser by its digest; none by default.
    """
    policy, ending = _POLICY, Html("")
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        ending = Html(f"<script>{script}</script>")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<main>
{joined(body)}
</main>
{ending}</body>
</html>
"""
