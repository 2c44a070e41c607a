"""The table of a producer's settings for the README, made of the code that has them."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import fields

from .client import SubmitSettings
from .tail_steps import TailSettings

_KINDS = (SubmitSettings, TailSettings)


def settings_table() -> str:
    """Return the table, one row a line."""
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for kind in _KINDS:
        meanings = dict(_docstrings(kind))
        for field in fields(kind):
            shown = "" if field.default is None else f"`{field.default}`"
            rows.append(f"| `{kind.__name__}.{field.name}` | {shown} | {meanings[field.name]} |")
    return "\n".join(rows)


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field's name and the text that stands below it."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id} needs a docstring"
            meaning = str(ast.literal_eval(text.value))
            yield field.target.id, " ".join(meaning.split())
