"""Options in groups, in a help without rich: what imports rich takes longer than the help."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

_UNGROUPED = "Options"


def option_group(title: str) -> Callable[..., Any]:
    """Return what makes options that the help lists under *title*."""

    def option(*flags: str, text: str, **settings: Any) -> Any:
        return typer.Option(*flags, help=text, rich_help_panel=title, **settings)

    return option


class GroupedCommand(TyperCommand):
    """A command whose help lists its options by group, in the order of the signature."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options; those of no group come last."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(_group(param), []).append(record)
        ungrouped = groups.pop(_UNGROUPED, [])
        for title, records in [*groups.items(), (_UNGROUPED, ungrouped)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _group(param: Any) -> str:
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or _UNGROUPED
