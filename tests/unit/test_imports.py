"""What a script imports, read and not run."""

from __future__ import annotations

import textwrap

import pytest

from everstep.worker.imports import Import, top_imports


def found(source: str) -> list[str]:
    return [
        entry.module + (f":{','.join(entry.names)}" if entry.names else "")
        for entry in top_imports(textwrap.dedent(source))
    ]


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import a", ["a"]),
        ("import a.b as c, d", ["a.b", "d"]),
        ("from a.b import c, d as e", ["a.b:c,d"]),
        ("from a import *", ["a"]),
        ("import a\nimport b\nimport a", ["a", "b"]),
        ("from __future__ import annotations\nimport a", ["a"]),
        ("from . import a\nfrom .b import c\nfrom .. import d", []),
        ("def f():\n    import a", []),
        ("class C:\n    import a", []),
        ("async def f():\n    import a", []),
        ("if x:\n    import a\nelse:\n    import b", []),
        ("for i in range(3):\n    import a", []),
        ("import a\nraise SystemExit(3)", ["a"]),
        ("", []),
    ],
)
def test_statements(source: str, modules: list[str]) -> None:
    assert found(source) == modules


def test_type_checking_is_skipped_and_its_else_is_not() -> None:
    source = """
        import typing
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            import a
        if typing.TYPE_CHECKING:
            import b
        else:
            import c
    """
    assert found(source) == ["typing", "typing:TYPE_CHECKING", "c"]


def test_the_body_of_a_try_is_taken_and_its_handlers_are_not() -> None:
    source = """
        try:
            import fast
        except ImportError:
            import slow
        else:
            import extra
        finally:
            import last
    """
    assert found(source) == ["fast", "extra", "last"]


@pytest.mark.parametrize("test", ['__name__ == "__main__"', "'__main__' == __name__"])
def test_a_main_block_is_run_as_it_is_the_script(test: str) -> None:
    assert found(f"if {test}:\n    import a\n    main()") == ["a"]


@pytest.mark.parametrize("test", ['__name__ != "__main__"', '__name__ == "x"', "__name__"])
def test_other_conditions_are_not_judged(test: str) -> None:
    assert found(f"if {test}:\n    import a") == []


def test_a_with_block_counts() -> None:
    assert found("with quiet():\n    import a") == ["a"]


@pytest.mark.parametrize("source", ["import", "def f(:", "import a\n  import b", b"\xff\xfe", "\0"])
def test_source_that_does_not_parse_has_none(source: str | bytes) -> None:
    assert top_imports(source) == ()


def test_bytes_with_a_declared_encoding() -> None:
    assert top_imports("# coding: latin-1\nimport a # ä".encode("latin-1")) == (Import(module="a"),)
