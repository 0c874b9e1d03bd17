"""The command line. A verb is a module here with a click command called `command`; nothing lists them."""

from __future__ import annotations

import errno
import importlib
import os
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

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb. A reader that leaves is told apart here: click and rich would exit with 1."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderLeftError from None
        except SystemExit as stop:
            if isinstance(stop.__context__, BrokenPipeError):
                raise _ReaderLeftError from None
            raise


class _ReaderLeftError(Exception):
    """The other end of stdout is closed, as after ``advisor ... | head``."""


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
    advisor demo                      train two small models here and report on each
    advisor analyze trace.json.gz     report on a saved torch.profiler trace, with advice
    advisor explain                   the rules that advice comes from
    advisor compare A B               two runs beside each other: faster, beyond the noise?
    advisor check report.json --max step_time=30ms
    """


#: As a shell tells SIGPIPE; 1 would read as a failed gate.
_BROKEN_PIPE = 141
#: Set to anything, it lets an unexpected error show its traceback.
DEBUG_VARIABLE = "TRAINING_ADVISOR_DEBUG"


def main(args: list[str] | None = None) -> None:
    """Run the command line; an error becomes one line on stderr and an exit code."""
    try:
        cli.main(args=args, prog_name="advisor", standalone_mode=False)
        if sys.stdout is not None:  # as after `>&-`
            sys.stdout.flush()
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.Abort:
        click.echo("advisor: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except AdvisorError as error:
        click.echo(f"advisor: {_shown(error)}", err=True)
        sys.exit(error.exit_code)
    except MemoryError:
        click.echo("advisor: there is not enough memory for this; capture fewer steps", err=True)
        sys.exit(3)
    except (BrokenPipeError, _ReaderLeftError):
        # The interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_BROKEN_PIPE)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            click.echo(f"advisor: the output cannot be written: {error.strerror}", err=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        if os.environ.get(DEBUG_VARIABLE):
            raise
        click.echo(f"advisor: {_shown(_unexpected(error))}", err=True)
        sys.exit(1)


def _shown(message: object) -> str:
    """The message with nothing in it that steers a terminal: it may hold a stranger's file names."""
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in str(message))


def _unexpected(error: Exception) -> str:
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return (
        f"an error that should not happen: {type(error).__name__}: {error}{place}. "
        f"Set {DEBUG_VARIABLE}=1 to see where it comes from, and please report it"
    )
