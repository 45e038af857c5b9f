"""Prompt files, paired statistics, and the same scores whatever the micro-batch."""

import math

import pytest
import torch

from evaluate import Setting, mean_and_error, pairs_of, read_prompts, score, score_pairs
from tiny import world as tiny

PAIRS = [
    (prompt, seed) for prompt in ("a red square moves left", "a blue circle stays still") for seed in range(3)
]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("p.txt", "a cat\n\n  a dog \n", ["a cat", "a dog"]),
        ("p.csv", 'index,prompt\n0,"a cat, asleep"\n1,a dog\n', ["a cat, asleep", "a dog"]),
        ("p.jsonl", '{"prompt": "a cat"}\n{"prompt": "a dog", "more": 1}\n', ["a cat", "a dog"]),
    ],
)
def test_prompt_files(tmp_path, name, text, prompts):
    (tmp_path / name).write_text(text)
    assert [prompt for prompt, _ in read_prompts(tmp_path / name)] == prompts


def test_seeds_of_a_prompt_file(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,seed\na cat,7\na dog,\na cat,7\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat", "seed": 0}\n')
    assert read_prompts(tmp_path / "p.csv") == [("a cat", 7), ("a dog", None), ("a cat", 7)]
    assert pairs_of(read_prompts(tmp_path / "p.csv"), 2) == [("a cat", 7), ("a dog", 0), ("a dog", 1)]
    assert read_prompts(tmp_path / "p.jsonl") == [("a cat", 0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "has no prompts"),
        ("p.csv", "index,text\n0,a cat\n", "no column `prompt`, its columns are index, text"),
        ("p.csv", "prompt\na cat\n  \na dog\n,\n", "line 3: no prompt"),
        ("p.jsonl", '{"prompt": "a cat"}\n{"prompt": \n', "line 2: not JSON"),
        ("p.jsonl", '["a cat"]\n', "line 1: expected"),
        ("p.jsonl", '{"text": "a cat"}\n', "line 1: no prompt"),
        ("p.csv", "prompt,seed\na cat,one\n", "line 2: the seed must be a whole number, got 'one'"),
        ("p.jsonl", '{"prompt": ""}\n', "line 1: no prompt"),
    ],
)
def test_bad_lines_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)


def test_the_shipped_prompts_are_held_apart():
    """Captions of the world, all of them, and none in both files."""
    files = "tiny/prompts.txt", "tiny/held_out.txt"
    trained, held_out = ([prompt for prompt, _ in read_prompts(file)] for file in files)
    assert sorted(trained + held_out) == sorted(tiny.CAPTIONS) and len(held_out) >= 10


def test_the_standard_error_is_of_the_mean():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    summary = mean_and_error(values)
    assert summary["error"] == pytest.approx(values.std().item() / 20)
    assert math.isnan(mean_and_error(torch.tensor([torch.nan]))["mean"])


def test_scores_do_not_depend_on_the_micro_batch(make_policy, world):
    policy = make_policy(prompts=[prompt for prompt, _ in PAIRS])
    tables = []
    for size in (1, 2, 4):
        seen = []
        setting = Setting(3, policy.shift, (8, 3, 8, 8), 8, size)
        done = list(
            score_pairs(policy, world, tiny.reward, PAIRS, setting, lambda *one, seen=seen: seen.append(one))
        )
        assert [each.pair for each in done] == PAIRS == [pair for pair, _ in seen]
        assert done[0].thumbnails.shape == (5, 3, 32, 32)
        tables.append(torch.tensor([list(each.scores.values()) for each in done]))
    assert torch.allclose(tables[0], tables[1], atol=1e-3) and torch.allclose(tables[0], tables[2], atol=1e-3)
    assert (tables[0][0] - tables[0][1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "answer", [{}, torch.zeros(2), {"a": torch.zeros(3)}, {"a": 1.0}, {"a": torch.zeros(2, 1)}]
)
def test_a_reward_of_the_wrong_shape(answer):
    with pytest.raises(ValueError, match="the reward must return"):
        score(lambda videos, prompts, fps: answer, torch.zeros(2, 9, 3, 32, 32), ["a", "a"], 8)
