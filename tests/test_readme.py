"""The README's snippets run as they are printed."""

import re
from pathlib import Path

import pytest
from conftest import MODEL
from test_train import run_here

from config import parse

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_generating_with_the_result(world, tmp_path, monkeypatch):
    run_here(world, tmp_path, iterations=1)
    (snippet,) = (code for code in SNIPPETS if "load_lora_adapter" in code)
    snippet = snippet.replace("runs/001", str(tmp_path / "run")).replace(
        "tiny/hunyuan", str(Path(MODEL).resolve())
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})
    assert (tmp_path / "clip.mp4").stat().st_size > 500


def test_the_recipes_are_options():
    """Those of the real model, as a shell would expand them; and what train.py would say to the sizes."""
    (block,) = (code for code in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "--nnodes" in code)
    names = dict(re.findall(r'^(\w+)="?([^"#\n]*?)"? *(?:#.*)?$', block, re.MULTILINE))
    lines = [
        line.split(" train.py ")[1] for line in block.replace("\\\n", " ").splitlines() if "train.py " in line
    ]
    assert len(lines) == 3
    for line in lines:
        expanded = re.sub(r"\$\{?(\w+)\}?", lambda name: names[name[1]], line)
        config, _ = parse(expanded.split(), "")
        assert (
            config.model.startswith("hunyuanvideo-community/") and config.criteria and config.eval_steps == 50
        )


def test_copying_a_module(capsys):
    (snippet,) = (code for code in SNIPPETS if "from sde import" in code)
    exec(compile(snippet, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 19


@pytest.mark.parametrize("command", ["torchrun train.py", "pytest"])
def test_the_two_commands_stand_there(command):
    assert f"pip install -r requirements.txt && {command}" in README


def test_every_linked_file_is_there():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
