"""The notebooks run, in a real kernel, on a small sample; and what is committed of them is fit to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("pandas")

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
MOST_BYTES = 500_000
IMAGES = "150"

# In a process of its own: the client leaves sockets and threads to the garbage collector.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
source, folder, out = sys.argv[1:]
notebook = nbformat.read(source, 4)
NotebookClient(
    notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": folder}}
).execute()
nbformat.write(notebook, out)
"""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebooks make their sample, one for all of them."""
    return tmp_path_factory.mktemp("notebooks")


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def kinds(cell: dict[str, Any]) -> list[list[str]]:
    """Return what a cell shows: the MIME types of each output, or the name of its stream."""
    return [sorted(output.get("data", {output.get("name", output["output_type"]): 0})) for output in cell["outputs"]]


def test_all_notebooks_are_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_epoch", "inspect", "train"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_showed(path: Path, workshop: Path, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LMDBSTORE_")}
    environment |= {"LMDBSTORE_WORK": str(workshop), "LMDBSTORE_SAMPLE": IMAGES}
    command = [sys.executable, "-c", RUN, str(path), str(path.parent), str(tmp_path / "run.ipynb")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    committed, found = code_cells(path), code_cells(tmp_path / "run.ipynb")
    for before, now in zip(committed, found, strict=True):
        if "".join(before["source"]).startswith("options ="):  # where nothing can be evicted, this one says so
            continue
        assert kinds(now) == kinds(before), "".join(before["source"])
    if path.stem == "train":
        text = "".join(text for cell in found for output in cell["outputs"] for text in output.get("text", ""))
        assert "largest difference of the losses: 0.0e+00" in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_was_run_whole_and_is_small(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for cell in cells for output in cell["outputs"] if output.get("name") == "stderr"]
    assert any("image/" in kind for cell in cells for output in kinds(cell) for kind in output)
    assert path.stat().st_size < MOST_BYTES
    text = path.read_text()
    assert str(REPOSITORY) not in text and str(Path.home()) + "/" not in text, "the path of a machine"
