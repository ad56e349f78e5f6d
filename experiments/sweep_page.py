"""What a sweep's page has beyond a run's: tables to sort and filter, with their script."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.comparison import LEGEND, Comparison, Table
from mass_jax.report_page import Html, element, joined

# Of every page with tables of comparisons.
TABLE_STYLE = """
:root { --far: #ffe9b8; --shade: rgb(0 0 0 / 28%); }
@media (prefers-color-scheme: dark) {
  :root { --far: #5a4310; --shade: rgb(255 255 255 / 32%); } }
main { max-width: 110rem; }
/* A shade at the right edge says that there is more; at the end of the table, a lid that scrolls
   with the table covers it. */
div.scroll { background:
  linear-gradient(to left, var(--paper) 40%, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--shade), transparent) right / 1.25rem 100% no-repeat scroll; }
/* Separate borders stay with a first column that does not scroll. Whole pixels: the browser draws
   that column in a layer of its own and rounds its fractions in another way. */
table.sortable { font-size: 14px; line-height: 22px; border-collapse: separate;
  border-spacing: 0; }
table.sortable th, table.sortable td { padding: 5px .55rem; }
table.sortable td { min-width: 0; white-space: nowrap; }
table.sortable thead th { vertical-align: bottom; }
/* One line of headers, with and without a button. */
table.sortable thead tr:only-child th { vertical-align: baseline; }
table.sortable th[colspan] { text-align: center; white-space: nowrap; }
table.sortable th.group, table.sortable td.group { border-left: 1px solid var(--line); }
table.sortable tr > :first-child:not(.group) { position: sticky; left: 0; background: var(--paper);
  min-width: 9.5rem; z-index: 1; padding-left: 0; box-shadow: 1px 0 var(--line); }
table.sortable tbody th { font-weight: 400; }
table.sortable tbody th span { white-space: nowrap; }
table.sortable thead button { font: inherit; font-weight: 600; color: inherit; background: none;
  border: 0; padding: 3px 0; text-align: inherit; cursor: pointer; white-space: nowrap; }
table.sortable thead button::after { content: " \\2195"; color: var(--soft); font-weight: 400; }
table.sortable th[aria-sort=ascending] button::after { content: " \\2191"; color: var(--ink); }
table.sortable th[aria-sort=descending] button::after { content: " \\2193"; color: var(--ink); }
:is(button, select, input, a, .scroll):focus-visible { outline: 3px solid var(--link);
  outline-offset: 1px; }
td.far { background: var(--far); font-weight: 600; }
td.missing { color: var(--soft); }
@media (min-width: 48rem) { table.sortable tbody th { white-space: nowrap; } }
@media print {
  :root { --far: #ffe9b8; }
  div.scroll { background: none; }
  table.sortable { font-size: 6.5pt; line-height: 1.3; }
  table.sortable :is(th, td) { padding: .1rem .2rem; }
  table.sortable tr > :first-child:not(.group) { min-width: 0; position: static;
    box-shadow: none; }
  table.sortable thead button::after { content: none; } }
"""

STYLE = (
    TABLE_STYLE
    + """
:root { --done: #1b7837; --started: #2166ac; --failed: #b2182b; }
@media (prefers-color-scheme: dark) {
  :root { --done: #7fcf8f; --started: #8cc8ff; --failed: #ff9c94; } }
.cards .done { border-left: .4rem solid var(--done); }
.cards .failed { border-left: .4rem solid var(--failed); }
.cards .started { border-left: .4rem solid var(--started); }
[hidden] { display: none !important; }
.progress { display: flex; height: .9rem; border-radius: .45rem; overflow: hidden;
  background: var(--card); border: 1px solid var(--line); max-width: 46rem; }
.progress .done { background: var(--done); }
.progress .started { background: var(--started); }
.progress .failed { background: var(--failed); }
#filters { display: flex; flex-wrap: wrap; gap: .75rem 1rem; align-items: end; margin: 1.5rem 0;
  padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
#filters label { display: grid; gap: .15rem; font-size: .85rem; color: var(--soft); }
#filters label.check { display: flex; align-items: center; gap: .4rem; min-height: 2.4rem; }
#filters select, button.all { font: inherit; font-size: 1rem; color: var(--ink);
  background: var(--paper); border: 1px solid var(--soft); border-radius: .35rem;
  padding: .3rem .5rem; min-height: 2.4rem; }
#filters input { width: 1.2rem; height: 1.2rem; }
#filters output { flex-basis: 100%; font-size: .92rem; }
td.done { color: var(--done); } td.started { color: var(--started); }
td.failed { color: var(--failed); font-weight: 600; }
@media (max-width: 40rem) {
  #filters label { flex: 1 1 40%; } #filters select { width: 100%; } }
@media print {
  :root { --done: #1b7837; --started: #2166ac; --failed: #b2182b; }
  #filters, .nothing { display: none; } }
"""
)

# A button in a header sorts its table. Without a script, all is in the order of the paper.
SORTING = """
"use strict";
const all = (root, selector) => [...root.querySelectorAll(selector)];
function compare(a, b, isDescending) {
  if (a === "" || b === "") return (a === "") - (b === "");  // what is missing comes last
  const order = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en", {numeric: true}) : a - b;
  return isDescending ? -order : order;
}
function sortBy(header) {
  const table = header.closest("table"), body = table.tBodies[0];
  const isDescending = header.getAttribute("aria-sort") === "ascending";
  for (const other of all(table, "th[aria-sort]")) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
  const key = row => row.cells[Number(header.dataset.column)].dataset.sort;
  const rows = [...body.rows].sort((a, b) => compare(key(a), key(b), isDescending));
  body.append(...rows);
}
for (const button of all(document, "thead button"))
  button.addEventListener("click", () => sortBy(button.closest("th")));
"""

# Filters hide what does not fit, and are kept in the address. Without a script, all is shown.
SCRIPT = (
    SORTING
    + """
const form = document.getElementById("filters"), choices = all(form, "select");
const onlyRun = form.elements.run;
const fits = (node, name) => {
  const wanted = form.elements[name].value;
  return wanted === "" || node.dataset[name] === undefined || node.dataset[name] === wanted;
};
const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;
function applyFilters() {
  let tables = 0, lines = 0;
  for (const section of all(document, "section[data-network]")) {
    for (const cell of all(section, "[data-metric]"))
      cell.hidden = !(fits(cell, "metric") && fits(cell, "size"));
    let shown = 0;
    for (const row of all(section, "tbody tr")) {
      const wasRun = all(row, "td.ours:not([hidden])").some(cell => cell.dataset.sort !== "");
      row.hidden = !fits(row, "method") || (onlyRun.checked && !wasRun);
      shown += row.hidden ? 0 : 1;
    }
    const hasColumns = all(section, "thead [data-metric]:not([hidden])").length > 0;
    section.hidden = !(fits(section, "network") && hasColumns && shown);
    if (!section.hidden) { tables += 1; lines += shown; }
  }
  let runs = 0;
  for (const row of all(document, "#runs tbody tr")) {
    row.hidden = !["network", "method", "size"].every(name => fits(row, name))
      || (onlyRun.checked && row.dataset.state === "waiting");
    runs += row.hidden ? 0 : 1;
  }
  for (const box of all(document, "#runs .scroll")) box.hidden = runs === 0;
  for (const words of all(document, "#runs .nothing")) words.hidden = runs > 0;
  for (const words of all(document, "#tables .nothing")) words.hidden = tables > 0;
  form.querySelector("output").textContent =
    `Shown: ${counted(runs, "run")}, ${counted(tables, "table")} with ${counted(lines, "row")}.`;
}
function keepInAddress() {
  const kept = new URLSearchParams();
  for (const choice of choices) if (choice.value !== "") kept.set(choice.name, choice.value);
  if (onlyRun.checked !== onlyRun.defaultChecked) kept.set("run", onlyRun.checked ? "only" : "all");
  history.replaceState(null, "", `#${kept}`);
}
function readAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const choice of choices) {
    const value = kept.get(choice.name) ?? "";
    choice.value = all(choice, "option").some(option => option.value === value) ? value : "";
  }
  onlyRun.checked = kept.has("run") ? kept.get("run") === "only" : onlyRun.defaultChecked;
  applyFilters();
}
function showAll() {
  for (const choice of choices) choice.value = "";
  onlyRun.checked = false;
  applyFilters();
  keepInAddress();
}
form.addEventListener("change", () => { applyFilters(); keepInAddress(); });
form.addEventListener("submit", event => event.preventDefault());
for (const button of all(document, "button.all")) button.addEventListener("click", showAll);
addEventListener("hashchange", readAddress);
form.hidden = false;
readAddress();
"""
)


class SortableCell(NamedTuple):
    """A cell of a sortable table.

    Attributes:
      shown: in the cell.
      sorted_by: a number, or text; empty comes last.
      kind: its class in the stylesheet.
    """

    shown: object
    sorted_by: float | str
    kind: str = ""


def filters(choices: dict[str, dict[str, str]], only_run: bool) -> Html:
    """The form that filters tables and runs; hidden until the script is there.

    Args:
      choices: for each field the values to choose from, with what is shown for them.
      only_run: whether what was not run is hidden at first.
    """
    parts = []
    for name, values in choices.items():
        options = [element("option", "all", value="")]
        options += [element("option", shown, value=value) for value, shown in values.items()]
        label = {"size": "training examples"}.get(name, name)
        parts.append(
            element("label", joined([label, element("select", joined(options), name=name)]))
        )
    box = Html(f'<input type="checkbox" name="run"{" checked" if only_run else ""}>')
    parts += [
        element("label", joined([box, "only what was run"]), class_="check"),
        _show_all(),
        element("output", "", aria_live="polite"),
    ]
    # The address keeps the filters, not the browser's memory of forms.
    return element(
        "form", joined(parts), id="filters", hidden="", autocomplete="off", aria_label="Filters"
    )


def filtered(name: str, parts: Iterable[Html]) -> Html:
    """A part of the page that says so when the filters leave nothing of it.

    Args:
      name: that the script knows it by.
      parts: of which the script hides some.
    """
    nothing = element("p", joined(["Nothing matches.", _show_all()]), class_="nothing", hidden="")
    return element("div", joined([*parts, nothing]), id=name)


def _show_all() -> Html:
    return element("button", "Show all", type="button", class_="all")


def comparison_heading() -> list[Html]:
    """What stands above the tables of comparisons."""
    return [
        element("h2", "Paper and ours"),
        element("p", f"{LEGEND} Shaded: a difference above 2 either way."),
    ]


def comparison_section(table: Table) -> Html:
    """A table of the paper, with ours and the difference in columns of their own."""
    top = [_button("method", 0, rowspan=2)]
    below = []
    for number, column in enumerate(table.columns):
        tags = {"data_metric": column.metric, "data_size": column.train_size}
        top.append(
            element("th", column.heading, scope="colgroup", colspan=3, class_="group", **tags)
        )
        for offset, name in enumerate(("paper", "ours", "difference"), 1):
            group = {"class_": "group number" if offset == 1 else "number"}
            below.append(_button(name, 3 * number + offset, **tags, **group))
    rows = []
    for row in table.rows:
        cells = [element("th", _label(row.label), scope="row", data_sort=row.label)]
        for column, comparison in zip(table.columns, row.comparisons, strict=True):
            tags = {"data_metric": column.metric, "data_size": column.train_size}
            cells += [_cell(cell, **tags) for cell in _comparison_cells(comparison)]
        rows.append(element("tr", joined(cells), data_method=row.method))
    return element(
        "section",
        joined([element("h3", table.title), _scrolling(table.title, [top, below], rows)]),
        data_network=table.network,
    )


def _label(label: str) -> Html:
    """Breaks between its parts only, not inside ``1e-05``."""
    *others, last = label.split(", ")
    return Html(" ".join(element("span", part) for part in (*(f"{o}," for o in others), last)))


def _comparison_cells(comparison: Comparison) -> tuple[SortableCell, ...]:
    seeds = f" (n={len(comparison.ours)})" if comparison.ours else ""
    difference = comparison.difference
    return (
        SortableCell(
            comparison.paper_text(),
            "" if comparison.paper is None else comparison.paper[0],
            "group number" if comparison.paper else "group number missing",
        ),
        SortableCell(
            comparison.mean_text() + seeds,
            float(np.mean(comparison.ours)) if comparison.ours else "",
            "ours number" if comparison.ours else "ours number missing",
        ),
        SortableCell(
            comparison.difference_text(),
            "" if difference is None else difference,
            "number far" if comparison.is_far else "number",
        ),
    )


def sortable_table(
    label: str,
    header: Sequence[str],
    rows: Iterable[tuple[dict[str, object], Sequence[SortableCell]]],
) -> Html:
    """A table each of whose columns sorts it, except the last.

    Args:
      label: what a screen reader calls it.
      header: of the columns.
      rows: attributes and cells of each.
    """
    *sorting, last = header
    head = [_button(name, number) for number, name in enumerate(sorting)]
    head.append(element("th", last, scope="col"))
    body = [
        element("tr", joined(_cell(cell) for cell in cells), **attributes)
        for attributes, cells in rows
    ]
    return _scrolling(label, [head], body)


def _button(name: str, column: int, **attributes: object) -> Html:
    return element(
        "th", element("button", name, type="button"), scope="col", aria_sort="none",
        data_column=column, **attributes,
    )  # fmt: skip


def _cell(cell: SortableCell, **attributes: object) -> Html:
    kind = {"class_": cell.kind} if cell.kind else {}
    return element("td", cell.shown, data_sort=cell.sorted_by, **kind, **attributes)


def _scrolling(label: str, head: Sequence[Sequence[Html]], body: Sequence[Html]) -> Html:
    content = [
        element("thead", joined(element("tr", joined(line)) for line in head)),
        element("tbody", joined(body)),
    ]
    # Focusable, so that the keyboard can scroll it too.
    return element(
        "div", element("table", joined(content), class_="sortable"), class_="scroll", tabindex=0,
        role="region", aria_label=label,
    )  # fmt: skip
