"""Rewards on tiny random models of the real classes; nothing is trained and nothing is downloaded.

The golden scores come from VideoAlign's own model class on transformers 4.45.2 and peft 0.10, with their
processor and their LoRA, on the checkpoint of `published_tensors`.
"""

import hashlib
import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLModel,
)

import reward
from reward import (
    VideoAlign,
    composite,
    frame_indices,
    frame_size,
    load_reward,
    load_videoalign,
    parse_weights,
)

RANK, ALPHA = 4, 8
SMALL = {"data_config": {"fps": 8.0, "min_frame_pixels": 28 * 28, "max_frame_pixels": 56 * 56}}
LINEAR = re.compile(r"\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight$")


def byte_tokenizer():
    """Qwen2's tokenizer with a token for each byte and the special tokens that a chat with a video needs."""
    tokenizer = Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]
    )
    names = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "video_pad"]
    special = [f"<|{name}|>" for name in names] + reward.REWARD_TOKENS
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.pad_token = "<|endoftext|>"
    return tokenizer


TOKENIZER = byte_tokenizer()


def qwen_config(vocabulary=None):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {
        "vocab_size": vocabulary or len(TOKENIZER),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
    }
    text |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
    }
    text |= {"bos_token_id": None, "eos_token_id": None}
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    video = TOKENIZER.convert_tokens_to_ids("<|video_pad|>")
    return Qwen2VLConfig(text_config=text, vision_config=vision, video_token_id=video)


def old_name(name):
    """The name of VideoAlign's checkpoint for a name of today's Qwen2VLModel."""
    name = re.sub(r"^language_model\.", "model.", name)
    return "base_model.model." + name


def published_tensors(config, rank=RANK, draw=True):
    """A checkpoint in the layout of the published model.pth: peft's names, LoRA, and an lm_head."""
    with torch.device("meta"):
        shapes = {old_name(name): x.shape for name, x in Qwen2VLModel(config).state_dict().items()}
    text = config.text_config
    shapes["base_model.model.rm_head.weight"] = torch.Size([1, text.hidden_size])
    shapes["base_model.model.lm_head.weight"] = torch.Size([text.vocab_size, text.hidden_size])
    for name in [name for name in shapes if LINEAR.search(name)]:
        shape, layer = shapes.pop(name), name.removesuffix(".weight")
        shapes[f"{layer}.base_layer.weight"] = shape
        shapes[f"{layer}.lora_A.default.weight"] = torch.Size([rank, shape[1]])
        shapes[f"{layer}.lora_B.default.weight"] = torch.Size([shape[0], rank])
        if f"{layer}.bias" in shapes:
            shapes[f"{layer}.base_layer.bias"] = shapes.pop(f"{layer}.bias")
    if not draw:
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    tensors = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if len(shape) > 1:
            tensors[name] = noise / math.sqrt(math.prod(shape[1:]))
        else:
            tensors[name] = 0.1 * noise + ("norm" in name or "ln_q" in name) * name.endswith(".weight")
    return tensors


def write_folder(folder, tensors, **settings):
    """A checkpoint folder around tensors in the published layout, with our short criteria."""
    checkpoint = folder / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    TOKENIZER.save_pretrained(checkpoint / "tokenizer")
    torch.save(tensors, checkpoint / "model.pth")
    qwen_config().save_pretrained(folder)
    (folder / "criteria.txt").write_text(reward.SHORT_CRITERIA)
    settings = {**reward.PUBLISHED, "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA}, **settings}
    (folder / "model_config.json").write_text(json.dumps(settings))
    return folder


def clips(count=2, frames=9, height=40, width=64, seed=0):
    return torch.rand(count, frames, 3, height, width, generator=torch.Generator().manual_seed(seed))


PROMPTS = ["a red square", "an old man walks his dog in the rain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(
        tmp_path_factory.mktemp("published") / "VideoReward", published_tensors(qwen_config())
    )


@pytest.fixture(scope="module")
def published(folder):
    return load_videoalign(folder, None, "cpu", torch.float32)


@pytest.fixture
def small():
    torch.manual_seed(0)
    settings = {**SMALL, "inference_config": reward.PUBLISHED["inference_config"]}
    return VideoAlign(qwen_config(), TOKENIZER, reward.SHORT_CRITERIA, settings)


def edited(folder, target, edit):
    """A copy of a checkpoint folder whose model.pth went through `edit`."""
    shutil.copytree(folder, target)
    file = target / "checkpoint-20" / "model.pth"
    tensors = torch.load(file, weights_only=True)
    edit(tensors)
    torch.save(tensors, file)
    return target


def first(tensors, ending):
    return next(name for name in sorted(tensors) if name.endswith(ending))


def test_scores_are_those_of_the_original_code(published):
    scores = published(clips(), PROMPTS, 4)
    torch.testing.assert_close(scores["VQ"], torch.tensor([-2.216923, -0.935062]), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores["MQ"], torch.tensor([-2.046150, -1.401584]), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores["TA"], torch.tensor([-0.793130, -1.419634]), atol=1e-4, rtol=0)
    torch.testing.assert_close(scores["Overall"], scores["VQ"] + scores["MQ"] + scores["TA"])
    assert not any(score.requires_grad for score in scores.values())


def test_only_text_alignment_reads_the_prompt(published):
    video = clips(1).expand(2, -1, -1, -1, -1)
    scores = published(video, PROMPTS, 4)
    for name in ("VQ", "MQ"):
        torch.testing.assert_close(scores[name][0], scores[name][1], atol=1e-6, rtol=0)
    assert abs(scores["TA"][0] - scores["TA"][1]) > 1e-2


def test_a_batch_scores_as_its_samples_and_padding_changes_nothing(small):
    videos, prompts = clips(3, height=32, width=32), ["a", "a much longer prompt " * 5, "a red square"]
    together = small(videos, prompts, 8)
    for i in range(3):
        alone = small(videos[i : i + 1], prompts[i : i + 1], 8)
        for name, score in together.items():
            torch.testing.assert_close(score[i : i + 1], alone[name], atol=1e-5, rtol=0)


def test_positions_count_the_tokens_and_are_not_those_of_qwen2_vl(small):
    videos = clips(2, height=64, width=64)
    seen = {}

    def look(_, __, inputs):
        seen.update(inputs)

    def use_mrope(_, __, inputs):
        kinds = (inputs["input_ids"] == small.model.config.video_token_id).int() * 2
        grid, mask = inputs["video_grid_thw"], inputs["attention_mask"]
        places = small.model.get_rope_index(
            inputs["input_ids"], kinds, video_grid_thw=grid, attention_mask=mask
        )[0]
        return (), {**inputs, "position_ids": places}

    with small.model.register_forward_pre_hook(look, with_kwargs=True):
        scores = small.raw_scores(videos, PROMPTS, 8)
    for axis in range(3):
        for row, mask in zip(seen["position_ids"][axis], seen["attention_mask"], strict=True):
            assert row[mask.bool()].tolist() == list(range(int(mask.sum())))
    with small.model.register_forward_pre_hook(use_mrope, with_kwargs=True):
        other = small.raw_scores(videos, PROMPTS, 8)
    assert (scores - other).abs().max() > 1e-3


def test_three_rows_in_the_head_are_one_for_each_token(small):
    three = VideoAlign(qwen_config(), TOKENIZER, reward.SHORT_CRITERIA, small.settings, head_dim=3)
    three.model.load_state_dict(small.model.state_dict())
    for k in range(3):
        with torch.no_grad():
            small.rm_head.weight.copy_(three.rm_head.weight[k : k + 1])
        scores = three.raw_scores(clips(), PROMPTS, 8)[:, k], small.raw_scores(clips(), PROMPTS, 8)[:, k]
        torch.testing.assert_close(*scores, atol=1e-6, rtol=0)


def test_the_head_is_float32_under_a_bfloat16_model(folder):
    scorer = load_reward("videoalign", model=str(folder))
    raw = scorer.raw_scores(clips(), PROMPTS, 4)
    assert scorer.model.dtype == torch.bfloat16 and raw.dtype == torch.float32
    assert (raw != raw.bfloat16()).any()


def test_raw_scores_train_every_parameter(small):
    small.raw_scores(clips(height=32, width=32), PROMPTS, 8).square().sum().backward()
    assert [name for name, x in small.named_parameters() if x.grad is None or not x.grad.any()] == []


@pytest.mark.parametrize(
    ("frames", "fps", "count"),
    [(81, 24, 6), (81, 16, 10), (81, 8, 20), (3, 24, 2), (2, 24, 2), (9, 24, 4), (121, 24, 10)],
)
def test_frames_are_sampled_at_two_a_second(frames, fps, count):
    indices = frame_indices(frames, fps)
    assert len(indices) == count and indices[0] == 0 and indices[-1] == frames - 1


def test_a_small_model_looks_at_frames_of_its_own_size(small):
    small.model.config.vision_config.patch_size = 8
    small.settings["data_config"] |= {"min_frame_pixels": 16 * 16, "max_frame_pixels": 32 * 32}
    rows, grid = small.pixel_rows(clips(2, height=32, width=32), 8)
    assert grid.tolist() == [[4, 4, 4]] * 2 and rows.shape == (2 * 64, 3 * 2 * 8 * 8)
    first = reward.standardize(reward.resize(clips(2, height=32, width=32)[0, :2], 32, 32))[..., :8, :8]
    assert rows[0].equal(first.transpose(0, 1).flatten())


def test_the_rate_of_the_clip_changes_its_scores(small):
    video = clips(1, frames=17, height=32, width=32)
    assert small(video, ["a"], 8)["VQ"] != small(video, ["a"], 16)["VQ"]


def test_one_frame_is_no_video(small):
    with pytest.raises(ValueError, match="1 frames at 24 fps"):
        small(clips(1, frames=1), ["a"], 24)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((32, 32), (336, 336)), ((480, 832), (336, 588)), ((832, 480), (588, 336)), ((448, 448), (448, 448))],
)
def test_frames_are_resized_into_the_published_limits(size, expected):
    limits = reward.PUBLISHED["data_config"]
    assert frame_size(*size, 28, limits["min_frame_pixels"], limits["max_frame_pixels"]) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_video_is_nan_with_a_warning_and_spares_the_others(small, bad):
    videos = clips(3, height=32, width=32)
    good = small(videos, ["a", "b", "c"], 8)
    videos[1, 4, 2, 3, 3] = bad
    with pytest.warns(UserWarning, match="sample 1 .*'b'"):
        scores = small(videos, ["a", "b", "c"], 8)
    for name, score in scores.items():
        assert score.isnan().tolist() == [False, True, False]
        torch.testing.assert_close(score[::2], good[name][::2], atol=1e-5, rtol=0)
    with pytest.warns(UserWarning, match="sample 0"):
        assert small(videos[1:2], ["b"], 8)["TA"].isnan().all()


def test_videos_of_another_range_or_shape_are_refused(small):
    with pytest.raises(ValueError, match=r"0\.\.1, got"):
        small(clips() * 255, PROMPTS, 8)
    with pytest.raises(ValueError, match=r"0\.\.1, got"):
        small(clips() * 2 - 1, PROMPTS, 8)
    with pytest.raises(ValueError, match="B prompts"):
        small(clips(), PROMPTS[:1], 8)
    with pytest.raises(ValueError, match=r"\[2, 3, 9, 40, 64\]"):
        small(clips().transpose(1, 2), PROMPTS, 8)


@pytest.mark.parametrize("token", ["<|TA_reward|>", "<|im_end|>", "<|anything|>"])
def test_a_special_token_in_a_prompt_is_refused(small, token):
    with pytest.raises(ValueError, match=re.escape(token)):
        small(clips(), ["a", f"a square {token}"], 8)


@pytest.mark.parametrize(
    "criteria", ["", "{text_prompt}", "{text_prompt} <|MQ_reward|> <|VQ_reward|> <|TA_reward|>"]
)
def test_criteria_need_the_prompt_and_the_tokens_in_order(criteria):
    with pytest.raises(ValueError, match="criteria need"):
        VideoAlign(qwen_config(), TOKENIZER, criteria)


def test_a_tokenizer_that_does_not_fit_is_refused():
    plain = Qwen2Tokenizer(
        vocab={letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]
    )
    with pytest.raises(ValueError, match="VQ_reward"):
        VideoAlign(qwen_config(), plain, reward.SHORT_CRITERIA)
    with pytest.raises(ValueError, match="do not fit"):
        VideoAlign(qwen_config(vocabulary=len(TOKENIZER) - 1), TOKENIZER, reward.SHORT_CRITERIA)
    moved = qwen_config()
    moved.video_token_id += 1
    with pytest.raises(ValueError, match="do not fit"):
        VideoAlign(moved, TOKENIZER, reward.SHORT_CRITERIA)


def assert_same_scores(one, other):
    a, b = one(clips(), PROMPTS, 4), other(clips(), PROMPTS, 4)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=1e-5, rtol=0)


def test_the_published_file_has_1123_tensors_and_each_has_a_place():
    config = Qwen2VLConfig(**reward.QWEN2_VL_2B)
    config.text_config.vocab_size = 151_660
    tensors = published_tensors(config, rank=64, draw=False)
    assert len(tensors) == 1123
    assert sum(x.numel() for x in tensors.values()) * 2 == pytest.approx(5_031_072_529, rel=1e-4)  # its bytes
    tensors = {reward.current_name(name): x for name, x in tensors.items()}
    folded = reward.fold_lora(tensors, {"lora_alpha": 128}, torch.bfloat16)
    with torch.device("meta"):
        expected = {f"model.{name}": x.shape for name, x in Qwen2VLModel(config).state_dict().items()}
    expected |= {"rm_head.weight": (1, 1536), "lm_head.weight": (151_660, 1536)}
    assert {name: x.shape for name, x in folded.items()} == expected


def test_a_folder_without_config_is_the_published_model_and_the_vocabulary_is_the_files(
    folder, published, tmp_path, monkeypatch
):
    target = edited(folder, tmp_path / "published", lambda tensors: None)
    (target / "config.json").unlink()
    monkeypatch.setattr(reward, "QWEN2_VL_2B", qwen_config(vocabulary=400).to_dict())
    assert_same_scores(load_videoalign(target, None, "cpu", torch.float32), published)


def test_what_is_saved_loads_to_the_same_scores(published, tmp_path):
    published.save(tmp_path)
    assert_same_scores(load_videoalign(tmp_path, None, "cpu", torch.float32), published)


def test_an_adapter_over_its_base_model_loads_to_the_same_scores(folder, published, tmp_path):
    tensors = torch.load(folder / "checkpoint-20" / "model.pth", weights_only=True)
    target = write_folder(tmp_path / "adapter", {}, model_config={"model_name_or_path": "../base"})
    checkpoint = target / "checkpoint-20"
    (checkpoint / "model.pth").unlink()
    lora = {name.replace(".default.", "."): x for name, x in tensors.items() if ".lora_" in name}
    save_file(lora, checkpoint / "adapter_model.safetensors")
    trained = {name: x for name, x in tensors.items() if "rm_head" in name or "visual.merger" in name}
    torch.save(trained, checkpoint / "non_lora_state_dict.pth")
    base = {name: x for name, x in tensors.items() if ".lora_" not in name and "rm_head" not in name}
    base = {
        n.removeprefix("base_model.model.").replace(".base_layer.", "."): x.clone() for n, x in base.items()
    }
    base["visual.merger.mlp.0.weight"].zero_()  # to be replaced by the trained one
    with pytest.raises(ValueError, match="Qwen2-VL-2B-Instruct"):
        load_videoalign(target, None, "cpu", torch.float32)
    (tmp_path / "base").mkdir()
    for part in range(2):
        shard = dict(list(base.items())[part::2])
        save_file(shard, tmp_path / "base" / f"model-0000{part + 1}-of-00002.safetensors")
    assert_same_scores(load_videoalign(target, None, "cpu", torch.float32), published)


def test_the_last_checkpoint_is_taken(folder, published, tmp_path):
    target = edited(folder, tmp_path / "two", lambda tensors: None)
    (target / "checkpoint-3").mkdir()
    assert_same_scores(load_videoalign(target, None, "cpu", torch.float32), published)


def test_rank_stabilized_lora_has_its_own_scale(folder, published, tmp_path):
    target = edited(folder, tmp_path / "rslora", lambda tensors: None)
    settings = {**reward.PUBLISHED, "peft_lora_config": {"lora_alpha": ALPHA / RANK**0.5, "use_rslora": True}}
    (target / "model_config.json").write_text(json.dumps(settings))
    assert_same_scores(load_videoalign(target, None, "cpu", torch.float32), published)


@pytest.mark.parametrize(
    ("error", "match", "edit"),
    [
        (
            RuntimeError,
            "Missing.*visual.blocks.0.norm1.bias",
            lambda t: t.pop(first(t, "visual.blocks.0.norm1.bias")),
        ),
        (
            RuntimeError,
            "Unexpected.*model.extra",
            lambda t: t.update({"base_model.model.model.extra": torch.ones(2)}),
        ),
        (RuntimeError, "size mismatch", lambda t: t.update({first(t, "norm1.bias"): torch.ones(3)})),
        (
            RuntimeError,
            "base_layer",
            lambda t: [t.pop(first(t, f"q_proj.lora_{x}.default.weight")) for x in "AB"],
        ),
        (ValueError, "q_proj lacks .*lora_B", lambda t: t.pop(first(t, "q_proj.lora_B.default.weight"))),
        (ValueError, "q_proj lacks", lambda t: t.pop(first(t, "q_proj.base_layer.weight"))),
        (ValueError, "no rm_head.weight", lambda t: t.pop(first(t, "rm_head.weight"))),
        (ValueError, "embed_tokens.weight", lambda t: t.clear()),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(folder, tmp_path, error, match, edit):
    target = edited(folder, tmp_path / "wrong", edit)
    with pytest.raises(error, match=re.compile(match, re.DOTALL)):
        load_videoalign(target, None, "cpu", torch.float32)


def test_pickled_code_is_not_run(folder, tmp_path):
    target = edited(folder, tmp_path / "code", lambda tensors: tensors.update(code=print))
    with pytest.raises(Exception, match="weights_only"):
        load_videoalign(target, None, "cpu", torch.float32)


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("no inference_config", {"inference_config": None}),
        ("'reward_token': 'last'", {"model_config": {"reward_token": "last"}}),
        ("'num_frames': 8", {"data_config": {"num_frames": 8}}),
        ("model_config.json's lora_alpha", {"peft_lora_config": None}),
    ],
)
def test_settings_that_change_the_scores_are_refused(folder, tmp_path, match, settings):
    target = edited(folder, tmp_path / "settings", lambda tensors: None)
    settings = {**json.loads((folder / "model_config.json").read_text()), **settings}
    settings = {name: section for name, section in settings.items() if section is not None}
    (target / "model_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=match):
        load_videoalign(target, None, "cpu", torch.float32)


def test_what_a_folder_lacks_is_named(folder, tmp_path):
    for name, match in (("criteria.txt", "prompt_template.py"), ("model_config.json", "model_config.json")):
        target = edited(folder, tmp_path / name, lambda tensors: None)
        (target / name).unlink()
        with pytest.raises(ValueError, match=match):
            load_reward("videoalign", model=str(target))
    with pytest.raises(ValueError, match="checkpoint-"):
        load_reward("videoalign", model=str(tmp_path))
    with pytest.raises(ValueError, match="needs model"):
        load_reward("videoalign")


def test_criteria_come_from_the_users_file_by_hash_and_the_file_is_not_run(folder, tmp_path, monkeypatch):
    text = f"\nJudge.\n{reward.SHORT_CRITERIA}\n"
    file = tmp_path / "prompt_template.py"
    file.write_text(f'OTHER = "x"\nraise SystemExit\nPROMPT = """{text}"""\n')
    with pytest.raises(ValueError, match="lacks VideoAlign's criteria"):
        load_reward("videoalign", model=str(folder), criteria=str(file))
    monkeypatch.setattr(reward, "CRITERIA_SHA256", hashlib.sha256(text.encode()).hexdigest())
    assert load_reward("videoalign", model=str(folder), criteria=str(file)).criteria == text


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **tower,
        "vocab_size": len(pieces),
        "eos_token_id": len(pieces) - 1,
        "bos_token_id": len(pieces) - 2,
    }
    vision = {**tower, "image_size": 32, "patch_size": 8}
    torch.manual_seed(3)
    model = CLIPModel(
        CLIPConfig(text_config=text, vision_config=vision, projection_dim=16, logit_scale_init_value=4.6)
    )
    folder = tmp_path_factory.mktemp("clip")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def clip_cosines(folder, videos, prompts):
    """Cosine of each frame by CLIPModel's own forward, [B, F]."""
    model, tokenizer = CLIPModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    mean, std = (torch.tensor(x)[:, None, None] for x in (reward.PIXEL_MEAN, reward.PIXEL_STD))
    rows = []
    for video, prompt in zip(videos, prompts, strict=True):
        tokens = tokenizer([prompt], return_tensors="pt")
        output = model(**tokens, pixel_values=(video - mean) / std)
        rows.append(output.logits_per_image[:, 0] / model.logit_scale.exp())
    return torch.stack(rows).detach()


def test_clip_scores_are_means_over_frames_of_clips_own_cosine(clip_folder):
    videos = clips(3, height=32, width=32)
    videos[:, 5:] = videos[:, 5:] ** 8  # so that the frames of a clip differ
    videos = (videos * 255).round() / 255
    prompts = ["a red square", "b", "an old man walks his dog"]
    cosine = clip_cosines(clip_folder, videos, prompts)
    assert (cosine < 0).any() and (cosine > 0).any()
    scores = load_reward("clipscore", model=str(clip_folder))(videos, prompts, 8)
    assert list(scores) == ["CLIP_cosine", "CLIPScore", "CLIPScore_100/30"]
    torch.testing.assert_close(scores["CLIP_cosine"], cosine.mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores["CLIPScore"], 2.5 * cosine.clamp(min=0).mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores["CLIPScore_100/30"], 100 * cosine.mean(1) / 30, atol=1e-5, rtol=0)
    pick = load_reward("pickscore", model=str(clip_folder))(videos, prompts, 8)
    assert list(pick) == ["Pick_cosine", "PickScore"]
    assert not any(score.requires_grad for score in (scores | pick).values())
    torch.testing.assert_close(pick["PickScore"], math.exp(4.6) * cosine.mean(1) / 26, atol=1e-5, rtol=0)


def test_clip_sees_the_centre_of_the_resized_frame(clip_folder):
    score = load_reward("clipscore", model=str(clip_folder))
    wide = clips(1, height=64, width=110)
    edges = wide.clone()
    edges[..., :16], edges[..., -16:] = 0, 1
    cut = reward.resize(wide.flatten(0, 1), 32, 55)[None, ..., 11:43]
    torch.testing.assert_close(
        score(wide, ["a"], 8)["CLIP_cosine"], clip_cosines(clip_folder, cut, ["a"]).mean(1)
    )
    torch.testing.assert_close(score(edges, ["a"], 8), score(wide, ["a"], 8))


def test_clip_reads_77_tokens(clip_folder):
    score = load_reward("clipscore", model=str(clip_folder))
    video, letters = clips(1, height=32, width=32), " ".join("abcdefgh" * 20)
    cut, same, shorter = (score(video, [letters[: 2 * n]], 8)["CLIP_cosine"] for n in (160, 75, 74))
    assert cut == same and cut != shorter


def test_clip_gives_nan_for_a_broken_video(clip_folder):
    videos = clips(2, height=32, width=32)
    videos[0, 0] = math.nan
    with pytest.warns(UserWarning, match="sample 0"):
        scores = load_reward("pickscore", model=str(clip_folder))(videos, PROMPTS, 8)
    assert scores["PickScore"].isnan().tolist() == [True, False]


def test_composite_weighs_and_keeps_nan():
    scores = {
        "VQ": torch.tensor([1.0, math.nan]),
        "MQ": torch.tensor([3.0, 1.0]),
        "TA": torch.tensor([5.0, 1.0]),
    }
    total = composite(scores, {"VQ": 0.5, "TA": -1.0})
    assert total[0] == -4.5 and total[1].isnan()
    with pytest.raises(ValueError, match="Quality"):
        composite(scores, {"VQ": 1.0, "Quality": 1.0})
    with pytest.raises(ValueError, match="weights"):
        composite(scores, {})


@pytest.mark.parametrize(
    "text", ["", "VQ", "VQ=", "=1", "VQ=one", "VQ=nan", "VQ=inf", "VQ=1,VQ=2", "VQ=1,", "VQ:1"]
)
def test_weights_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_weights(text)


def test_a_users_own_function_is_a_reward(tmp_path, monkeypatch):
    (tmp_path / "my_own_reward.py").write_text(
        "def brightness(videos, prompts, fps):\n    return {'B': videos.mean((1, 2, 3, 4))}\n"
    )
    (tmp_path / "my_broken_reward.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    scores = load_reward("my_own_reward:brightness")(torch.full((2, 2, 3, 4, 4), 0.5), ["a", "b"], 8)
    assert scores["B"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="no callable 'darkness'"):
        load_reward("my_own_reward:darkness")
    with pytest.raises(ValueError, match="takes no model"):
        load_reward("my_own_reward:brightness", model="folder")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        load_reward("my_broken_reward:reward")


@pytest.mark.parametrize("name", ["", "videoaline", "math", ":prod", "math:"])
def test_an_unknown_name_lists_what_is_known(name):
    known = "tiny, tiny_videoalign, videoalign, clipscore, pickscore, or module:function"
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))}.*{known}"):
        load_reward(name)


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no module 'no_such_module\.at_all'"):
        load_reward("no_such_module.at_all:reward")


def test_the_tiny_names_are_those_of_the_tiny_world():
    assert load_reward("tiny").__module__ == "tiny.world"
    assert {name.partition(":")[0] for name in reward.ALIASES.values()} == {"tiny.world"}
