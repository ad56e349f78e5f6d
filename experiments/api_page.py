"""``python -m experiments.api_page --write``: the reference page, made of the docstrings.

Without ``--write`` the page goes to the standard output. ``tests/test_api_page.py`` fails when
``mass_jax/API.md`` and the docstrings differ.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mass_jax.command_line import Parser

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "mass_jax" / "API.md"
MODULES = ("mass_jax", "mass_jax.data", "mass_jax.networks", "mass_jax.metrics")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example|References):[ ]*(.*)$")
_WIDTH = 100


def public_objects() -> Iterator[tuple[ModuleType, str, Any]]:
    """Module, name and object of every public name, each object once."""
    seen: set[int] = set()
    for module in map(import_module, MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            if id(found) not in seen:
                seen.add(id(found))
                yield module, name, found


def sections(docstring: str) -> list[tuple[str, str, str]]:
    """``(heading, rest of its line, body)`` of a docstring; the first has no heading.

    Example:
      >>> sections("One line.\\n\\nReturns:\\n  a number.")
      [('', '', 'One line.'), ('Returns', '', 'a number.')]
    """
    parts: list[tuple[str, str, list[str]]] = [("", "", [])]
    for line in inspect.cleandoc(docstring).splitlines():
        heading = _SECTION.match(line)
        if heading:
            parts.append((heading[1], heading[2], []))
        else:
            parts[-1][2].append(line)
    return [(*part[:2], textwrap.dedent("\n".join(part[2])).strip()) for part in parts]


def documented_names(docstring: str) -> set[str]:
    """Names that ``Args`` and ``Attributes`` explain; ``a, b: ...`` explains both."""
    return {
        name.strip().lstrip("*")
        for heading, _, body in sections(docstring)
        if heading in ("Args", "Attributes")
        for names in re.findall(r"^([*\w][\w, *]*):", body, re.MULTILINE)
        for name in names.split(",")
    }


def signature(name: str, found: Any) -> str:
    """The call as the source has it: type aliases keep their names."""
    node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
    result = ""
    if isinstance(node, ast.ClassDef):
        own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if own:
            arguments = _arguments(own[0].args)[1:]  # without self
        else:  # a named tuple, a dataclass, a Flax module: fields are arguments
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            arguments = [ast.unparse(field) for field in fields]
    else:
        assert isinstance(node, ast.FunctionDef)
        arguments = [a for a in _arguments(node.args) if a != "self"]
        result = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    line = f"{name}({', '.join(arguments)}){result}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){result}"
    return line


def _arguments(arguments: ast.arguments) -> list[str]:
    """Each argument with its type and default; ``*`` by itself where it stands."""
    positional, named = arguments.args, arguments.kwonlyargs
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    parts = [_argument(a, d) for a, d in zip(positional, defaults, strict=True)]
    parts += ["*"] if named else []
    parts += [_argument(a, d) for a, d in zip(named, arguments.kw_defaults, strict=True)]
    parts += [f"**{_argument(arguments.kwarg, None)}"] if arguments.kwarg else []
    return parts


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(argument)
    return text if default is None else f"{text} = {ast.unparse(default)}"


def as_markdown(docstring: str) -> str:
    """A docstring as Markdown: lists of arguments, examples as code."""
    parts = []
    for heading, rest, body in sections(docstring):
        if heading == "":
            parts.append(body)
        elif heading == "Example":
            caption = f"Example: {rest}" if rest else "Example:"
            parts.append(f"{caption}\n\n```python\n{body}\n```")
        elif heading in ("Args", "Attributes", "Raises"):
            items = re.sub(r"^([*\w][\w, *]*):", r"- **\1**:", body, flags=re.MULTILINE)
            parts.append(f"{heading}:\n\n{items}")
        else:
            parts.append(f"{heading}: {rest or body}")
    return "\n\n".join(parts)


def _methods(found: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties a class defines itself; a field may hold a function too."""
    for name, member in vars(found).items():
        if name in vars(found).get("__annotations__", {}):
            continue
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            yield name, member


def _entry(module: ModuleType, name: str, found: Any) -> str:
    title = f"### `{module.__name__}.{name}`"
    if isinstance(found, Mapping):
        return f"{title}\n\nBy name:\n\n" + "\n".join(_registry(found))
    if not (inspect.isclass(found) or callable(found)):
        return f"{title}\n\nThe value `{found!r}`."
    source = Path(inspect.getsourcefile(inspect.unwrap(found)) or "").relative_to(PAGE.parent)
    parts = [title]
    if not getattr(found, "_is_protocol", False):  # nobody makes one
        parts.append(f"```python\n{signature(name, inspect.unwrap(found))}\n```")
    parts += [as_markdown(found.__doc__), f"[{source}]({source})"]
    if inspect.isclass(found):
        for method, member in _methods(found):
            is_property = isinstance(member, property)
            call = method if is_property else signature(method, member)
            doc = as_markdown((member.fget if is_property else member).__doc__)
            parts.append(f"#### `{name}.{method}`\n\n```python\n{call}\n```\n\n{doc}")
    return "\n\n".join(parts)


def _registry(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each entry, with what it says of itself."""
    for name, value in found.items():
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f'- `"{name}"`: {(value.__doc__ or "").strip().splitlines()[0]}'
        else:  # a value, whose source has comments
            kind = type(value)
            source = Path(inspect.getsourcefile(kind) or "").relative_to(PAGE.parent)
            yield f'- `"{name}"`: `{kind.__name__}`, see [{source}]({source})'


def page() -> str:
    """The whole page."""
    entries: dict[str, list[str]] = {name: [] for name in MODULES}
    for module, name, found in public_objects():
        entries[module.__name__].append(_entry(module, name, found))
    parts = [
        "# Reference",
        "Made of the docstrings by `python -m experiments.api_page --write`; edit those. Shapes: "
        "`B` examples, `D` numbers each, representations of `R`, `K` classes, `M` components. "
        "Equations are those of [arXiv:1905.07822](https://arxiv.org/abs/1905.07822).",
    ]
    for name, texts in entries.items():
        parts += [f"## `{name}`", (import_module(name).__doc__ or "").strip(), *texts]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.api_page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="renew mass_jax/API.md instead")
    if parser.parse_args(argv).write:
        PAGE.write_text(page())
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
