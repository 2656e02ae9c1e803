"""Recipes: found, shown, checked, copied, and what they need fetched."""

from __future__ import annotations

from pathlib import Path

import click

from trainkit.command import plugins_option, recipe_file, shipped_recipes
from trainkit.errors import UserError


@click.command()
def ls() -> None:
    """List the recipes that come with trainkit."""
    from trainkit import copying

    found = sorted(shipped_recipes().glob("*.yaml"))
    if not found:
        raise UserError(str(shipped_recipes()), "holds no recipes", remedy="they are part of the repository")
    for path in found:
        click.echo(f"{path.stem:24} {copying.headline(path)}")


@click.command()
@click.argument("what")
@plugins_option
def show(what: str, plugins: tuple[str, ...]) -> None:
    """Show a recipe with its defaults, a run (name, beginning of it, or MLflow id), or a checkpoint folder."""
    path = recipe_file(what)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        from trainkit import config, copying

        resolved = config.dump(config.load(path, (), plugins))
        click.echo(copying.header(path) + resolved, nl=False)
        return
    from trainkit import checkpoint

    if path.is_dir() and (path / checkpoint.MANIFEST).exists():
        click.echo(checkpoint.describe(path))
        return
    from trainkit import lineage
    from trainkit.store import Store

    folder = Store.locate().find(what)
    for key, value in vars(folder.info()).items():
        click.echo(f"{key:14} {value}")
    if changed := lineage.read(folder):
        click.echo(f"\n{changed}", nl=False)
    for step in sorted(folder.checkpoints.glob("step-*")):
        click.echo()
        click.echo(checkpoint.describe(step))


@click.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1)
@plugins_option
def check(recipe: str, overrides: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Validate RECIPE, print it resolved, and say which data or weights are not there yet."""
    from trainkit import order

    click.echo(order.check(order.Order(recipe_file(recipe), overrides, plugins)), nl=False)


@click.command()
@click.argument("recipe")
@click.argument("new", type=click.Path(path_type=Path))
@plugins_option
def cp(recipe: str, new: Path, plugins: tuple[str, ...]) -> None:
    """Copy RECIPE to NEW for another data set; the lines to change are marked."""
    from trainkit import copying

    marked = copying.copy(recipe_file(recipe), new, plugins)
    click.echo(f"{new}: change the {marked} lines marked with {copying.MARK!r}, then: trainkit check {new}")


@click.command()
@click.argument("recipe")
@plugins_option
def fetch(recipe: str, plugins: tuple[str, ...]) -> None:
    """Download what RECIPE names, each file checked by its SHA-256. Training itself never uses the network."""
    from trainkit import fetching

    for line in fetching.fetch(recipe_file(recipe), plugins):
        click.echo(line)
