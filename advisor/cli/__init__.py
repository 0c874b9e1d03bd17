"""The command line. A verb is a module here with a click command called `command`; nothing lists them."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import click

from advisor.errors import AdvisorError


class Verbs(click.Group):
    """Finds verbs by file name and imports the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the verbs, in alphabetical order."""
        return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, or None if there is no such verb."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"{__name__}.{cmd_name}").command


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        from advisor import __version__

        click.echo(f"training-advisor {__version__}")
        ctx.exit()


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version."
)
def cli() -> None:
    """Say why a training step takes as long as it does, and what to change.

    \b
    advisor demo                      train a small model here and open its report
    advisor analyze trace.json.gz     report on a saved torch.profiler trace
    """


def main(args: list[str] | None = None) -> None:
    """Run the command line; an `AdvisorError` becomes one line on stderr and its exit code."""
    try:
        cli.main(args=args, prog_name="advisor", standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        click.echo("advisor: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except AdvisorError as error:
        click.echo(f"advisor: {error}", err=True)
        sys.exit(error.exit_code)
