"""The notebooks run top to bottom without a word of complaint, and are committed clean."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|work|usr|var|opt|mnt|private|Users)/|\b[A-Z]:\\")

every_notebook = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def complaints(notebook) -> list[str]:
    """Errors, and whatever went to stderr: warnings, progress bars."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    return errors + [output.text for output in outputs if output.get("name") == "stderr"]


def words(notebook) -> str:
    """All that can be read in a notebook: its cells and their outputs, but for the pictures."""
    texts = [cell.source for cell in notebook.cells]
    for cell in code_cells(notebook):
        for output in cell.outputs:
            texts.append(output.get("text", ""))
            texts += [
                str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")
            ]
    return "\n".join(texts)


@every_notebook
def test_a_notebook_runs_without_complaint(path):
    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    assert complaints(notebook) == []


@every_notebook
def test_a_notebook_is_committed_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert complaints(notebook) == []


@every_notebook
def test_a_notebook_is_small_and_of_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 500_000
    assert notebook.metadata == {"kernelspec": KERNEL}  # the version of Python would stand beside it
    assert [cell.id for cell in notebook.cells if cell.metadata] == []  # the seconds of its execution, if any
    assert MACHINE_PATH.search(words(notebook)) is None
