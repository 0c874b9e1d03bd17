"""The errors that a user may see, each with the exit code that the command line returns for it."""

import shlex


class AdvisorError(Exception):
    """Something that the user can act on: the message says what, where, and the way out.

    Attributes:
        exit_code: what the process returns: 0 fine, 1 a gate failed, 2 usage, 3 input unusable.
    """

    exit_code = 1


class UsageError(AdvisorError):
    """An option or argument that cannot be carried out as given."""

    exit_code = 2


class InputError(AdvisorError):
    """A trace, counter or settings file that cannot be used."""

    exit_code = 3


class MissingExtraError(UsageError):
    """A feature whose optional packages are not installed.

    Args:
        feature: what needs them.
        packages: as pip is to be given them.
    """

    def __init__(self, feature: str, *packages: str) -> None:
        which = "a package that is" if len(packages) == 1 else "packages that are"
        super().__init__(f"{feature} needs {which} not installed: pip install {shlex.join(packages)}")
