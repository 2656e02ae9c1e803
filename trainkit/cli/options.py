"""Shared parts of the commands: how they fail, and options that several of them take."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from trainkit.errors import EXIT_CODE, UserError, of_disk, visible
from trainkit.paths import recipe_file, recipe_word
from trainkit.redact import hide_in_logs, without_secrets

if TYPE_CHECKING:
    from trainkit.config.run_request import RunRequest


class Plain(click.Command):
    """A command that reports user errors as one message with exit code 2, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command line."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **extra)
        try:
            code = super().main(*args, standalone_mode=False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = EXIT_CODE
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else self.name
            code = _say(f"{error.format_message().rstrip('.')}; see {path} --help")
        except click.ClickException as error:
            code = _say(error.format_message())
        except UserError as error:
            code = EXIT_CODE if error.told else _say(str(error), error)
        except click.Abort:
            code = 130
        except Exception as error:
            if isinstance(error, OSError) and (said := of_disk(error)) is not None:
                code = _say(str(said), error)
            else:
                # As Python would, but what is printed goes into logs that others read.
                echo(without_secrets("".join(traceback.format_exception(error))), err=True, nl=False)
                code = 1
        # A verb returns nothing, or its exit code.
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, with secrets kept out of logs."""
        hide_in_logs()
        return super().invoke(ctx)


class Commands(Plain, click.Group):
    """A group of such commands."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.headings: dict[str, list[str]] = {}
        """Headings of the help, and the commands below each."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands below their headings."""
        columns = max(len(name) for names in self.headings.values() for name in names)
        for heading, names in self.headings.items():
            limit = formatter.width - 6 - columns
            rows = [(name, self.commands[name].get_short_help_str(limit)) for name in names]
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(columns), text) for name, text in rows])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name; `train` is another of `run`. What became of earlier ones is said."""
        if args[0] in _RENAMED:
            ctx.fail(f"{args[0]} is no longer a command of trainkit; {_RENAMED[args[0]]}")
        name = "run" if args[0] == "train" else args[0]
        return super().resolve_command(ctx, [name, *args[1:]])


_RENAMED = {
    "ladder": "it is called trainkit bench now",
    "fetch": "it is called trainkit download now",
    "limits": "trainkit preflight RECIPE measures the upper bounds of its throughput",
    "claims": "run python -m benchmarks.claims",
    "projector": "the rows of an inspection hold its embeddings: docs/reference/artifacts.md",
}
"""Commands of earlier versions, and what to use instead."""


def _say(message: str, error: Exception | None = None) -> int:
    """Print a message, and the notes of its error on lines of their own."""
    rank = os.environ.get("RANK", "0")
    echo(f"{'' if rank == '0' else f'[process {rank}] '}error: {without_secrets(message)}", err=True)
    for note in getattr(error, "__notes__", ()):
        echo(without_secrets(note), err=True)
    return EXIT_CODE


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text with its control characters escaped."""
    click.echo(visible(str(text)), err=err, nl=nl)


def next_step(*words: object, why: str = "", err: bool = False) -> None:
    """Print the command that may follow: `Next: trainkit check mine.yaml  # why`.

    To stderr with `err`, for commands whose output is data.
    """
    if os.environ.get("RANK", "0") == "0":
        command = shlex.join(["trainkit", *(str(word) for word in words)])
        echo(f"Next: {command}" + (f"  # {why}" if why else ""), err=err)


plugins_option = click.option(
    "--plugin", "plugins", multiple=True, metavar="PACKAGE", help="Import this plug-in package first; may be repeated."
)


def columns_option(text: str) -> Callable[[Any], Any]:
    """Return the option --columns, described by a text."""
    return click.option("--columns", multiple=True, metavar="WHAT=NAME", help=text)


def read_columns(given: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Read `image=img,label=fine_label`. Raises UsageError for what is not so, and for columns that are not `known`."""
    found: dict[str, str] = {}
    for word in ",".join(given).split(",") if given else ():
        what, _, name = word.partition("=")
        if not what or not name or (known and what not in known):
            kinds = f"{', '.join(known[:-1])} or {known[-1]}, and a column" if known else "what it is, and a column"
            raise click.UsageError(f"--columns {word}: {kinds}, as label=fine_label")
        found[what] = name
    return found


words_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


def recipe_command(
    *options: Callable[[Any], Any], cls: type[click.Command] = click.Command, required: bool = True, **settings: Any
) -> Any:
    """Make a command that takes RECIPE, KEY=VALUE overrides, `options` and --plugin."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        recipe = click.argument("recipe", required=required)
        for option in (plugins_option, *reversed(options), words_argument, recipe):
            function = option(function)
        return click.command(cls=cls, **settings)(function)

    return decorate


def announced_order(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> RunRequest:
    """Print that work on a recipe starts, and make the request for it."""
    announce(recipe)
    from trainkit.config.run_request import RunRequest

    return RunRequest(recipe_file(recipe), overrides, plugins)


def refuse_errors(request: RunRequest) -> None:
    """Raise ConfigError with every error in keys and values of a recipe: before torch is imported, which takes seconds.

    Those of a sweep, whose overrides have several values, and of a run that is continued are found later.
    """
    from trainkit.config import run_request

    if not request.sweep and request.resume is None and os.path.isfile(request.path):
        run_request.load(request)


def announce(recipe: str) -> None:
    """Print on rank 0 that work on a recipe starts: importing torch takes seconds.

    To stderr, since the output may be data. For a file that does not exist only the error is printed.
    """
    if recipe_file(recipe).is_file():
        announce_start(recipe)


def announce_start(what: str) -> None:
    """Print on rank 0 that work on a recipe, or a run, starts."""
    if os.environ.get("RANK", "0") == "0":
        echo(f"{what}: starting; loading torch and accelerate", err=True)


def say_valid(request: RunRequest, whole: bool = False) -> int:
    """Print what is to decide in the recipe of a request, and to stderr that it is valid, with the command that trains
    it; if `whole` print the resolved recipe too.

    Raises UserError, after that is printed, where a run of it would not start.
    """
    refuse_errors(request)
    from trainkit.experiments import recipe_check

    echo(recipe_check.check(request, whole), nl=False)
    for name in recipe_check.open_all(request):
        said = "its data is large and was not opened; preflight opens it and checks what depends on it"
        echo(f"{name}: {said}", err=True)
    echo(f"valid: {request.path}", err=True)
    next_step(*run_words(request), why="train it", err=True)
    return 0


def run_words(request: RunRequest) -> list[str]:
    """Return the words of the command that carries out a request."""
    named = plugin_words(request.plugins)
    if request.resume and request.settings is not None:  # of its own recipe and options
        return ["run", "--resume", request.resume, *named]
    verb, options = "run", ["--folds"] if request.folds else []
    if request.seeds is not None:
        verb, options = "repeat", ["--seeds", str(request.seeds)]
    if request.sweep:
        verb = "sweep"
    if request.resume is not None:
        options += ["--resume-or-start"] if request.or_start else ["--resume", *filter(None, [request.resume])]
    return [verb, recipe_word(request.path), *request.overrides, *named, *options]


def recipe_words(request: RunRequest) -> list[str]:
    """Return the words by which a command names the recipe of a request."""
    return [recipe_word(request.path), *request.overrides, *plugin_words(request.plugins)]


def plugin_words(plugins: Sequence[str]) -> list[str]:
    """Return the options that name plug-ins."""
    return [word for plugin in plugins for word in ("--plugin", plugin)]
