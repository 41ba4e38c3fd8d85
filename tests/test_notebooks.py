"""The notebooks: stripped and short in git; with -m notebooks, executed on a CPU with a budget."""

import ast
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BUDGET = 180  # seconds of one notebook on two cores, compiling included
LONGEST = 20  # lines of a cell; more is helper code, which lives in k3jax.explore
PICTURES = {"01": 0, "02": 4, "03": 4, "04": 3, "05": 3, "06": 2}
notebooks = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def cells(path, kind):
    book = json.loads(path.read_text())
    return [cell for cell in book["cells"] if cell["cell_type"] == kind]


def test_there_are_six():
    assert [path.stem[:2] for path in PATHS] == sorted(PICTURES)


@notebooks
def test_outputs_are_stripped(path):
    text = path.read_text()
    book = json.loads(text)
    assert text == json.dumps(book, indent=1, ensure_ascii=False) + "\n"
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    for cell in book["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@notebooks
def test_cells_hold_no_helper_code(path):
    for cell in cells(path, "code"):
        assert len(cell["source"]) <= LONGEST, cell["source"][0]
        tree = ast.parse("".join(cell["source"]))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert not any(isinstance(node, kinds) for node in ast.walk(tree)), cell["source"][0]


@notebooks
def test_it_ends_with_a_thing_to_try(path):
    last = json.loads(path.read_text())["cells"][-1]
    assert last["cell_type"] == "markdown"
    assert "## Try\n" in last["source"]


@pytest.mark.notebooks
@pytest.mark.timeout(BUDGET + 60)
@notebooks
def test_it_runs(path, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    # The kernel is a child: it shares the tests' compilations (conftest.py), not their devices.
    flags = os.environ["XLA_FLAGS"].split()
    flags = [flag for flag in flags if "force_host_platform_device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    book = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, timeout=BUDGET, resources=where).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    complaints = [each.text for each in outputs if each.get("name") == "stderr"]
    assert not any("Warning" in text for text in complaints), complaints
    pictures = [each for each in outputs if "image/png" in each.get("data", {})]
    assert len(pictures) == PICTURES[path.stem[:2]]
