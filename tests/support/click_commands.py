"""Command lines that trainkit prints, checked against the commands that exist."""

from __future__ import annotations

import shlex

import click
from click.testing import CliRunner

from trainkit.cli import main


def paths(group: click.Group = main.main, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Names of all commands, those of `trainkit data` too."""
    found = []
    for name, command in group.commands.items():
        inner = paths(command, (*before, name)) if isinstance(command, click.Group) else [(*before, name)]
        found += inner
    return found


def find(words: tuple[str, ...] | list[str]) -> click.Command:
    """The command of these names."""
    command: click.Command = main.main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    return command


def ask(*words: object, code: int = 0) -> str:
    """What a command prints on both streams; it must end with this code and without a traceback."""
    done = CliRunner().invoke(main.main, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def parsed(line: str) -> bool:
    """Parse a line, such as `Next:   trainkit check x.yaml  # why`, as click would; fails where it cannot."""
    words = shlex.split(line.removeprefix("Next:").partition("  #")[0])
    assert words[0] == "trainkit", line
    command, rest = main.main, words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{line}: no such command"
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("trainkit", list(rest), resilient_parsing="--help" in rest)
    return True


def following(output: str) -> list[str]:
    """The commands of the `Next:` lines of an output, each of which can be parsed."""
    lines = [line for line in output.splitlines() if line.startswith("Next:")]
    assert lines, output
    assert all(parsed(line) for line in lines)
    assert output.rstrip().splitlines()[-1] == lines[-1], "the last line"
    return lines
