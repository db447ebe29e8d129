"""The public names document arguments, results and errors, and the examples in their docstrings run."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import pipeline

MODULES = sorted({getattr(pipeline, name).__module__ for name in pipeline.__all__})


def callables() -> list[tuple[str, Callable[..., Any]]]:
    """Return every public function, class with a constructor of its own, and method of a public class."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for name in pipeline.__all__:
        value = getattr(pipeline, name)
        if inspect.isfunction(value):
            found.append((name, value))
            continue
        for attribute, method in vars(value).items():
            method = getattr(method, "__func__", method)
            if inspect.isfunction(method) and not attribute.startswith("_"):
                found.append((f"{name}.{attribute}", method))
    return found


def classes() -> list[str]:
    """Return the public classes; without Protocols, whose `__init__` is a placeholder that refuses every call."""
    values = {name: getattr(pipeline, name) for name in pipeline.__all__}
    return [name for name, kind in values.items() if inspect.isclass(kind) and not getattr(kind, "_is_protocol", False)]


def section(docstring: str, title: str) -> str:
    """Return the lines of a section of a Google-style docstring, or nothing."""
    match = re.search(rf"^{title}:\n((?:^[ ].*\n?|^\n)+)", inspect.cleandoc(docstring), re.MULTILINE)
    return match.group(1) if match else ""


def raised(function: Callable[..., Any]) -> set[str]:
    """Return the names of the errors that a function raises itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_a_public_function_says_what_it_takes_gives_and_raises(subtests: pytest.Subtests) -> None:
    for name, function in callables():
        with subtests.test(name):
            docstring = inspect.getdoc(function) or ""
            signature = inspect.signature(inspect.unwrap(function))
            parameters = [parameter for parameter in signature.parameters if parameter not in ("self", "cls")]
            documented = re.findall(r"^    \*{0,2}(\w+):", section(docstring, "Args"), re.MULTILINE)
            assert docstring
            assert documented == parameters or (not documented and "see `" in docstring.splitlines()[0])
            if signature.return_annotation not in (None, "None") and documented:
                assert section(docstring, "Returns") or docstring.startswith(("Yield", "Iterate"))
            assert raised(inspect.unwrap(function)) <= set(re.findall(r"\w+", section(docstring, "Raises")))


@pytest.mark.parametrize("name", classes())
def test_a_public_class_says_what_its_constructor_takes(name: str) -> None:
    kind = getattr(pipeline, name)
    docstring = kind.__doc__ or ""
    # A named tuple's constructor is made from its fields, as a dataclass's.
    has_fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    if not has_fields and not section(docstring, "Args"):
        docstring = kind.__init__.__doc__ or ""
    if dataclasses.is_dataclass(kind):
        inherited = {
            field.name
            for base in kind.__mro__[1:]
            if dataclasses.is_dataclass(base)
            for field in dataclasses.fields(base)
        }
        expected = [field.name for field in dataclasses.fields(kind) if field.name not in inherited]
    elif has_fields:
        expected = [*kind._fields]
    else:
        expected = [parameter for parameter in inspect.signature(kind.__init__).parameters if parameter != "self"]

    title = "Attributes" if has_fields else "Args"
    documented = re.findall(r"^    (\w+):", section(docstring, title), re.MULTILINE)

    assert documented == expected
    if not has_fields:
        for error in raised(kind.__init__):
            assert error in section(docstring, "Raises"), error


def examples() -> list[doctest.DocTest]:
    """Return the examples of the public modules; each runs with the public names and torch at hand."""
    import torch

    names = {name: getattr(pipeline, name) for name in pipeline.__all__} | {"torch": torch}
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = [importlib.import_module(name) for name in MODULES]
    return [test for module in modules for test in finder.find(module, extraglobs=names) if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_the_examples_of_the_docstrings_run(example: doctest.DocTest) -> None:
    report: list[str] = []

    results = doctest.DocTestRunner().run(example, out=report.append)

    assert results.attempted > 0
    assert results.failed == 0, "".join(report)


def test_each_name_of_the_seeds_shows_an_example() -> None:
    shown = {example.name.rpartition(".")[2] for example in examples()}

    assert {
        "DetachedReplayBuffer",
        "Experience",
        "NaiveExperienceMaker",
        "is_vl_experience",
        "make_experience_batch",
        "remove_padding_in_sequences",
        "split_experience_batch",
        "zero_pad_sequences",
    } <= shown
