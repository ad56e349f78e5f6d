"""Tables of comparisons as Markdown, LaTeX, CSV and HTML."""

import csv
import io
from collections.abc import Callable, Iterable

import numpy as np

from experiments import sweep_page
from experiments.cells import DROPOUT_RATE, WEIGHT_DECAY
from experiments.comparison import LEGEND, Comparison, Table, TableRow
from mass_jax.report_page import element, page

_CSV_HEADER = (
    "table", "subject", "network", "train_size", "method", "beta", "dropout", "weight_decay",
    "batch_stats", "steps", "detector", "metric", "paper_mean", "paper_std", "our_mean", "our_std",
    "n", "difference_in_standard_errors",
)  # fmt: skip
_LATEX_PACKAGES = r"% needs \usepackage{booktabs,graphicx}"
# Only what is too wide is made smaller; `\width` is the table's own.
_LATEX_FIT = r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"


def _texts(row: TableRow) -> list[str]:
    pairs = ((c.paper_text(), c.ours_text()) for c in row.comparisons)
    return [row.label, *(text for pair in pairs for text in pair)]


def as_markdown(tables: Iterable[Table]) -> str:
    parts = [f"{LEGEND}\n"]
    for table in tables:
        header = ["method"]
        for column in table.columns:
            header += [f"{column.heading}: paper", "ours"]
        lines = [header, ["---"] * len(header), *map(_texts, table.rows)]
        grid = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"**{table.title}**\n\n{grid}\n")
    return "\n".join(parts)


def as_latex(tables: Iterable[Table]) -> str:
    """Floats for ``\\input``; LaTeX numbers them itself."""
    parts = [_LATEX_PACKAGES, _escaped_for_latex(LEGEND), ""]
    for table in tables:
        groups = [_escaped_for_latex(column.heading) for column in table.columns]
        above = ["", *(rf"\multicolumn{{2}}{{c}}{{{group}}}" for group in groups)]
        header = ["method", *("paper", "ours") * len(groups)]
        rules = [rf"\cmidrule(lr){{{2 * i}-{2 * i + 1}}}" for i in range(1, len(groups) + 1)]
        rows = [[*map(_escaped_for_latex, _texts(row))] for row in table.rows]
        above_line, header_line, *lines = [" & ".join(r) + r" \\" for r in (above, header, *rows)]
        parts += [
            r"\begin{table}\centering\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{_escaped_for_latex(table.subject)}}}",
            _LATEX_FIT,
            rf"\begin{{tabular}}{{l{'rr' * len(groups)}}}\toprule",
            above_line,
            "".join(rules),
            header_line,
            r"\midrule",
            *lines,
            r"\bottomrule\end{tabular}}",
            r"\end{table}",
            "",
        ]
    return "\n".join(parts)


def _escaped_for_latex(text: str) -> str:
    for symbol in "%_&#":
        text = text.replace(symbol, f"\\{symbol}")
    for plain, made in (("±", r"$\pm$"), ("·", r"$\cdot$"), ("beta=", r"$\beta$=")):
        text = text.replace(plain, made)
    return text


def as_csv(tables: Iterable[Table]) -> str:
    """One line per number, for a data frame: what is not there is empty."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    for table in tables:
        for row in table.rows:
            setting = row.setting
            trained = (
                row.method,
                None if setting.method == "softmax_ce" else setting.beta,
                DROPOUT_RATE if setting.dropout else 0.0,
                WEIGHT_DECAY if setting.weight_decay else 0.0,
                setting.batch_stats,
                setting.steps,
                row.detector,
            )
            for column, comparison in zip(table.columns, row.comparisons, strict=True):
                where = (table.number, table.subject, table.network, column.train_size)
                numbers = _numbers(comparison)
                writer.writerow([*where, *trained, column.metric, *numbers])
    return stream.getvalue()


def _numbers(comparison: Comparison) -> tuple[float | None, ...]:
    ours = comparison.ours
    return (
        *(comparison.paper or (None, None)),
        float(np.mean(ours)) if ours else None,
        float(np.std(ours)) if len(ours) > 1 else None,
        len(ours),
        comparison.difference,
    )


def as_html(tables: Iterable[Table]) -> str:
    title = "MASS Learning: the paper's tables, and our runs"
    return page(
        title,
        [
            element("h1", title),
            *sweep_page.comparison_heading(),
            *map(sweep_page.comparison_section, tables),
        ],
        style=sweep_page.TABLE_STYLE,
        script=sweep_page.SORTING,
    )


FORMATS: dict[str, Callable[[Iterable[Table]], str]] = {
    "md": as_markdown,
    "latex": as_latex,
    "csv": as_csv,
    "html": as_html,
}
