"""What a script imports at its top, found by reading it.

The zygote imports these before it forks, so that a worker starts in milliseconds. The script is
parsed, never run. Only what is sure to be imported at once counts: statements at the top level, in
`if __name__ == "__main__"`, in the else of `if TYPE_CHECKING`, in the body of a `try` and in a
`with`. An import under another condition may be for another machine, and one in a function may
never come. A miss costs the worker time, never correctness: it imports what it lacks itself.

It does not know whether a module exists, nor what happens when it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One module, and the names taken from it, which may be modules themselves."""

    module: str
    names: tuple[str, ...] = ()


def top_imports(source: str | bytes) -> tuple[Import, ...]:
    """The absolute imports that `source` makes when it is run, in its order, each once.

    Relative imports and `__future__` are left out. Source that does not parse has none: the worker
    shows the error. Pure.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ()
    return tuple(dict.fromkeys(_imports(body)))


def _imports(body: Iterable[ast.stmt]) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(module=alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module and node.module != "__future__":
                names = tuple(alias.name for alias in node.names if alias.name != "*")
                yield Import(module=node.module, names=names)
        elif isinstance(node, ast.If):
            if _is_type_checking(node.test):
                yield from _imports(node.orelse)
            elif _is_main(node.test):
                yield from _imports(node.body)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            yield from _imports([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _imports(node.body)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _is_main(test: ast.expr) -> bool:
    if (
        not isinstance(test, ast.Compare)
        or len(test.ops) != 1
        or not isinstance(test.ops[0], ast.Eq)
    ):
        return False
    sides = {ast.unparse(test.left), ast.unparse(test.comparators[0])}
    return sides == {"__name__", "'__main__'"}
