"""What a family of kernels says of itself, read from its source, so that no torch is needed to list it.

A family is a module here without a leading underscore. Near its top stands

    FAMILY = Family(what="...", public=("...",), replaces=("...",))

with literal arguments; its timed sizes lie in ``bench/<family>.py``, its checks in ``verify/<family>.py``.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Family:
    """A family's own description.

    Attributes:
        what: one line.
        public: names that `advisor.kernels` hands out.
        replaces: PyTorch's names for what these kernels stand in for.
        differs: what is otherwise than there, in a few words; nothing where one may simply be put for the
            other.
        dtypes: of activations.
        hardware: what they are written for.
    """

    what: str
    public: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    differs: str = ""
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    hardware: str = "NVIDIA of compute capability 8.0 or newer"


def families(folder: Path = _HERE) -> dict[str, Family]:
    """Every family by its module's name; one that has no `FAMILY` goes by its docstring's first line."""
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return {name: _described(folder / f"{name}.py") for name in names}


def _described(path: Path) -> Family:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for statement in _descriptions(tree):
        assert isinstance(statement.value, ast.Call)
        given = {k.arg: ast.literal_eval(k.value) for k in statement.value.keywords if k.arg}
        return Family(**given)
    return Family(what=(ast.get_docstring(tree) or path.stem).splitlines()[0])


def _descriptions(tree: ast.Module) -> list[ast.Assign]:
    """The statement `FAMILY = Family(...)`, if there is one."""
    return [
        statement
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and [ast.unparse(target) for target in statement.targets] == ["FAMILY"]
    ]


def fingerprint(name: str, folder: Path = _HERE) -> str:
    """A hash of the sources that make up a family: the same where its kernels are the same.

    Lines that are blank or hold a comment alone do not count, nor does what the family says of itself.
    """
    digest = hashlib.sha256()
    for path in sources(name, folder):
        text = path.read_text(encoding="utf-8")
        lines = [line.rstrip() for line in text.splitlines()]
        for said in _descriptions(ast.parse(text)):
            del lines[said.lineno - 1 : said.end_lineno]
        kept = [line for line in lines if line and not line.lstrip().startswith("#")]
        digest.update("\n".join([path.name, *kept, ""]).encode())
    return digest.hexdigest()[:16]


def sources(name: str, folder: Path = _HERE) -> list[Path]:
    """The family's module and all modules of this folder that it imports, directly or not, by name."""
    found: set[str] = set()
    queue = [name]
    while queue:
        module = queue.pop()
        if module not in found and (folder / f"{module}.py").is_file():
            found.add(module)
            queue += _imported(folder / f"{module}.py")
    # This module describes kernels and takes no part in them.
    return [folder / f"{module}.py" for module in sorted(found - {Path(__file__).stem})]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                yield node.module.split(".")[0]
            else:
                yield from (alias.name for alias in node.names)
