"""The shape of the package: who may import whom, what an import costs, how long a function may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lmdbstore"

# The table of the parts, from the ground up: a module imports only what stands above it.
# Beside each, the outside libraries that it may import (numpy and the standard library: everybody).
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),
    "layout": {"msgpack", "xxhash"},
    "pages": set(),
    "template": set(),
    "sniff": set(),
    "headers": set(),
    "integrity": set(),
    "turbo": {"turbojpeg"},
    "opencv": {"cv2"},
    "plans": set(),
    "restarts": set(),
    "tiles": set(),
    "codec": set(),
    "memory": set(),
    "pagecache": set(),
    "selection": set(),
    "mapping": set(),
    "store": set(),
    "readahead": set(),
    "shuffle": set(),
    "mixing": set(),
    "samplers": {"torch"},
    "augment": set(),
    "dataset": {"torch"},
    "buffers": {"torch"},
    "crew": {"torch"},
    "assembly": {"torch"},
    "loader": {"torch"},
    "normalization": {"torch"},
    "verification": set(),
    "publish": set(),
    "export": set(),
    "ingestion": {"lmdb", "msgpack", "ray", "xxhash"},
    "remote": {"fsspec"},
    "folder": {"albumentations", "cv2"},
    "costs": {"torch"},
    "epochs": set(),
    "bench": {"torch"},
    "doctor": set(),
    "listing": set(),
    "thumbnails": set(),
    "duplicates": set(),
    "pictures": {"matplotlib"},
    "sheets": set(),
    "plots": {"matplotlib"},
    "tables": {"pandas"},
    "notebook": set(),
    "cli": {"typer", "tqdm"},
    "__main__": set(),
}
# Within the package of several files, these have one file to themselves.
ONLY_IN = {"lmdb": "ingestion/writer.py", "ray": "ingestion/on_ray.py"}
MAY_INGEST = {"ingestion", "cli", "__main__"}
HEAVY = ("torch", "ray", "fsspec", "matplotlib", "pandas", "cv2", "albumentations", "scipy", "lmdb")
PUBLIC = {
    "BatchLoader",
    "BlockShuffleSampler",
    "ImageDataset",
    "ImageStore",
    "IngestOptions",
    "LmdbstoreError",
    "ingest",
    "normalize",
    "verify",
}
LONGEST_FUNCTION = 60  # lines
STANDARD = sys.stdlib_module_names


def is_python(path: Path) -> bool:
    with path.open(errors="replace") as file:
        return re.match(r"#!.*\bpython", file.readline()) is not None


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
TOOLS = sorted(path for path in (PACKAGE.parent / "tools").iterdir() if path.is_file() and is_python(path))


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


def part(path: Path) -> str:
    """Return the row of the table that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports, those in functions too; not what only the type checker sees."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            nodes.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))


def own_parts(path: Path) -> set[str]:
    """Return the rows of the table that a file imports."""
    found = {dotted.split(".")[1] for dotted in imports(path) if dotted.startswith("lmdbstore.")}
    return {module for module in found if (PACKAGE / module).exists() or (PACKAGE / f"{module}.py").exists()}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each function of a file and its length in lines, docstring included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{name(path)}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_file_has_its_place_in_the_table(path: Path) -> None:
    assert part(path) in TABLE, f"{name(path)}: put it into TABLE where it belongs"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_up_the_table(path: Path) -> None:
    order = list(TABLE)
    here = order.index(part(path))
    below = {module for module in own_parts(path) if module not in order[: here + 1]}
    assert not below, f"{name(path)} imports {sorted(below)}, which stand below it"


@pytest.mark.parametrize("path", [path for path in FILES if part(path) not in MAY_INGEST], ids=name)
def test_the_read_side_never_imports_ingest(path: Path) -> None:
    assert "ingestion" not in own_parts(path)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_each_outside_library_has_one_place(path: Path) -> None:
    outside = {dotted.split(".")[0] for dotted in imports(path)} - STANDARD - {"lmdbstore", "numpy", "__future__"}
    assert outside <= TABLE[part(path)], f"{name(path)} imports {sorted(outside - TABLE[part(path)])}"
    astray = {library for library in outside & set(ONLY_IN) if name(path) != f"lmdbstore/{ONLY_IN[library]}"}
    assert not astray, f"{name(path)} imports {sorted(astray)}, which {[ONLY_IN[library] for library in astray]} has"


@pytest.mark.parametrize("module", ["lmdbstore", "lmdbstore.errors", "lmdbstore.cli"])
def test_import_is_light(module: str) -> None:
    code = f"import {module}, sys; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


def test_public_names_are_pinned() -> None:
    import lmdbstore

    assert set(lmdbstore.__all__) == PUBLIC
    assert len(PUBLIC) <= 12
    assert set(dir(lmdbstore)) >= PUBLIC
    for public in PUBLIC:
        assert callable(getattr(lmdbstore, public)), public


def test_an_unknown_name_is_an_attribute_error() -> None:
    import lmdbstore

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lmdbstore.no_such_name


@pytest.mark.parametrize("path", [*FILES, *TOOLS, PACKAGE / "__init__.py"], ids=name)
def test_functions_are_short(path: Path) -> None:
    long = [(where, lines) for where, lines in functions(path) if lines > LONGEST_FUNCTION]
    assert not long


def test_most_functions_are_very_short() -> None:
    lengths = sorted(lines for path in FILES for _, lines in functions(path))
    assert lengths[len(lengths) // 2] <= 12, "median, docstrings included"
