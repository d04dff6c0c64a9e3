"""Command groups whose commands are imported only when called, so that --help is instant."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A command group that knows the names and one-line helps of its commands, and imports a module only to run its
    command, or to search a subgroup for an unknown one."""

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Mapping[str, tuple[str, str]]],
        subgroups: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        """sections: title of a section of the help -> name of a command -> (module or module:attribute, line of help).
        subgroups: names of the commands that are groups."""
        super().__init__(*args, **kwargs)
        self._sections = sections
        self._subgroups = subgroups
        self._entries = {name: entry for section in sections.values() for name, entry in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._entries:
            return None
        module, _, attribute = self._entries[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command in `args`. Raises UsageError, which suggests similar names, if there is none."""
        if args[0].startswith("-") or args[0] in self._entries or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(args[0], self._entries, n=2)
        groups = [name for name in self._subgroups if self._has_subcommand(ctx, name, args[0])]
        suggestions = " or ".join([*near, *(f"{name} {args[0]}" for name in groups)])
        question = f"; did you mean {suggestions}?" if suggestions else ""
        raise click.UsageError(f"no such command {args[0]!r}{question}", ctx)

    def _has_subcommand(self, ctx: click.Context, group: str, name: str) -> bool:
        """Whether a group in this one has a command of that name."""
        subgroup = self.get_command(ctx, group)
        return isinstance(subgroup, click.Group) and name in subgroup.list_commands(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self._entries))
        for title, section in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), doc) for name, (_, doc) in section.items()])
