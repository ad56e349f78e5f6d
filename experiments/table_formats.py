"""Tables of comparisons as Markdown, LaTeX, CSV and HTML."""

import csv
import html
import io
from collections.abc import Callable, Iterable

import numpy as np

from experiments.comparison import Comparison, Table


def _texts(table: Table) -> tuple[list[str], list[list[str]]]:
    header = ["method"]
    for column in table.columns:
        header += [f"{column.heading}, paper", "ours"]
    body = [
        [row.label, *(text for c in row.comparisons for text in (c.paper_text(), c.ours_text()))]
        for row in table.rows
    ]
    return header, body


def as_markdown(tables: Iterable[Table]) -> str:
    parts = []
    for table in tables:
        header, body = _texts(table)
        lines = [header, ["---"] * len(header), *body]
        grid = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"**{table.title}**\n\n{grid}\n")
    return "\n".join(parts)


def as_latex(tables: Iterable[Table]) -> str:
    def escaped(text: str) -> str:
        for symbol in "%_&#":
            text = text.replace(symbol, f"\\{symbol}")
        return text.replace("±", r"$\pm$").replace("beta=", r"$\beta$=")

    parts = []
    for table in tables:
        above = [
            rf"\multicolumn{{2}}{{c}}{{{escaped(column.heading)}}}" for column in table.columns
        ]
        header = ["method", *("paper", "ours") * len(table.columns)]
        rows = [["", *above], header, *([*map(escaped, line)] for line in _texts(table)[1])]
        lines = [" & ".join(row) + r" \\" for row in rows]
        lines.insert(2, r"\midrule")
        columns = "l" + "rr" * len(table.columns)
        parts += [
            r"\begin{table}\centering\footnotesize",
            rf"\caption{{{escaped(table.title)}}}",
            rf"\begin{{tabular}}{{{columns}}}\toprule",
            *lines,
            r"\bottomrule\end{tabular}\end{table}",
            "",
        ]
    return "\n".join(parts)


def as_csv(tables: Iterable[Table]) -> str:
    """One line per number: easy to read into a data frame."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["table", "row", "column", "paper_mean", "paper_std", "our_mean", "our_std", "seeds",
         "difference_in_standard_errors"]
    )  # fmt: skip
    for table in tables:
        for row in table.rows:
            for column, comparison in zip(table.columns, row.comparisons, strict=True):
                ours = comparison.ours
                own = [np.mean(ours), np.std(ours)] if ours else ["not run", ""]
                paper = comparison.paper or ("", "")
                difference = "" if comparison.difference is None else comparison.difference
                numbers = (*paper, *own, len(ours), difference)
                writer.writerow([table.title, row.label, column.heading, *numbers])
    return stream.getvalue()


_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin-bottom: 2rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td { white-space: nowrap; }
td.missing { color: #767676; }
td.far { background: #fff1d6; }
caption { text-align: left; font-weight: 600; padding: .5rem 0; }
"""


def as_html(tables: Iterable[Table]) -> str:
    parts = []
    for table in tables:
        header, body = _texts(table)
        head = "".join(f"<th scope=col>{html.escape(text)}</th>" for text in header)
        lines = []
        for row, texts in zip(table.rows, body, strict=True):
            kinds = [""] + [kind for c in row.comparisons for kind in ("", _html_class(c))]
            lines.append(
                "<tr>"
                + "".join(
                    f"<td{kind}>{html.escape(text)}</td>"
                    for kind, text in zip(kinds, texts, strict=True)
                )
                + "</tr>"
            )
        parts.append(
            f"<table><caption>{html.escape(table.title)}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>MASS Learning: paper and ours</title><style>{_STYLE}</style>"
        "<h1>MASS Learning: the paper's tables, and our runs</h1>"
        "<p>Paper: mean ± standard deviation of 4 seeds. Ours: mean ± deviation, n seeds, and the "
        "difference in standard errors of both means combined; shaded where it is above 2.</p>"
        + "\n".join(parts)
        + "</html>\n"
    )


def _html_class(comparison: Comparison) -> str:
    if not comparison.ours:
        return " class=missing"
    return " class=far" if comparison.is_far else ""


FORMATS: dict[str, Callable[[Iterable[Table]], str]] = {
    "md": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
    "html": as_html,
}
