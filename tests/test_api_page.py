"""The reference page and the docstrings it is made of."""

import inspect
import re

import flax.linen as nn
import pytest

from experiments.api_page import PAGE, documented_names, page, public_objects, sections

OBJECTS = {
    f"{module.__name__}.{name}": found
    for module, name, found in public_objects()
    if callable(found)
}


def test_page_is_what_the_docstrings_say():
    """Oracle: the page made anew. To renew it: python -m experiments.api_page --write."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", OBJECTS)
def test_docstring_is_complete(name):
    """Oracle: the signature. Errors and protocols are not called by anybody: no example."""
    found = OBJECTS[name]
    headings = [heading for heading, _, _ in sections(found.__doc__)]
    if inspect.isclass(found):
        if issubclass(found, Exception) or getattr(found, "_is_protocol", False):
            return
        arguments = set(getattr(found, "__annotations__", {}))
        if issubclass(found, nn.Module):
            arguments -= {"name", "parent"}  # of every module, by flax
    else:
        signature = inspect.signature(found)
        arguments = set(signature.parameters)
        assert "Returns" in headings or signature.return_annotation is None
    assert arguments <= documented_names(found.__doc__)
    assert "Example" in headings
    assert ">>>" in found.__doc__


def test_equations_are_named_alike():
    """Oracle: the form `MASS, arXiv:1905.07822, ...`, and the numbers the paper has (1 to 28)."""
    for name, found in OBJECTS.items():
        for heading, _, body in sections(found.__doc__):
            if heading == "References":
                assert body.startswith(("MASS, arXiv:1905.07822", "He et al.")), name
        for number in re.findall(r"Eqs?\. \((\d+)\)", found.__doc__):
            assert 1 <= int(number) <= 28, name
