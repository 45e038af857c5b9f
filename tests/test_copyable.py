"""Each module of the star is one file to copy: it needs torch alone and none of the others."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAR = [
    name for name in ("sde", "equalizer", "trust_region", "grpo", "reward") if (ROOT / f"{name}.py").exists()
]
INSIDE_FUNCTIONS = {
    "reward": {"transformers", "safetensors", "accelerate", "huggingface_hub", "PIL", "numpy"}
}


def imports(tree: ast.AST) -> set[str]:
    """Top-level packages imported anywhere in the tree; a relative import counts as '.'."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.partition(".")[0])
    return names


def functions(tree: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("name", STAR)
def test_imports_torch_and_the_standard_library_alone(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    allowed = {"torch"} | sys.stdlib_module_names
    within = set().union(*(imports(function) for function in functions(tree)))
    for function in functions(tree):
        function.body = [ast.Pass()]  # what is left runs when the module is imported
    assert imports(tree) <= allowed
    assert within <= allowed | INSIDE_FUNCTIONS.get(name, set())


def test_copies_import_each_from_a_folder_of_its_own(tmp_path):
    copies = []
    for name in STAR:
        folder = tmp_path / f"only_{name}"  # a folder called sde would itself be importable as sde
        folder.mkdir()
        copies.append(shutil.copy(ROOT / f"{name}.py", folder))
    script = "import runpy, sys\nfor copy in sys.argv[1:]: runpy.run_path(copy, run_name='copied')"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", script, *copies], cwd=tmp_path, env=environment, check=True)
