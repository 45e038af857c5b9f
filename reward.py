"""Rewards for videos: VideoAlign, CLIPScore, PickScore, their weighted sum, or a function of your own.

A reward is any callable `reward(videos, prompts, fps) -> {name: [B] tensor}`, videos [B, F, C, H, W] in 0..1.
A sample that it cannot score is NaN, never a default score. Only differences between scores mean something:
VideoAlign's are in standard deviations over a validation set, and mostly negative even for good clips.

    reward = load_reward("videoalign", model="VideoReward", criteria="VideoAlign/prompt_template.py")
    scores = reward(videos, prompts, fps=24)  # VQ, MQ, TA and Overall, each [B]
    total = composite(scores, parse_weights("VQ=0.5,MQ=0.5,TA=1"))  # [B], the paper's Setting B

It reads no video files. Depends on torch; the models also on transformers and accelerate. Copy this file.
"""

import ast
import copy
import hashlib
import importlib
import json
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Reward = Callable[[Tensor, list[str], float], dict[str, Tensor]]

# Of a colour over CLIP's training images; Qwen2-VL uses the same.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)

SPECIAL_TOKEN = re.compile(r"<\|.*?\|>")
# VideoAlign's head is read at these, which its criteria name in this order.
REWARD_TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
# The criteria that VideoAlign was trained with are its authors' own: read from their file, known by a hash.
CRITERIA_SHA256 = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"
# Ours, for a model that is trained with them.
SHORT_CRITERIA = "Looks: <|VQ_reward|> Motion: <|MQ_reward|> Shows {text_prompt}: <|TA_reward|>"

# From VideoAlign's model_config.json, but for the smallest frame, a constant of its code.
PUBLISHED = {
    "data_config": {"fps": 2.0, "min_frame_pixels": 128 * 28 * 28, "max_frame_pixels": 448 * 448},
    "inference_config": {
        **{"VQ_mean": 3.6757, "VQ_std": 2.2476, "MQ_mean": 1.1646, "MQ_std": 1.3811},
        **{"TA_mean": 2.8105, "TA_std": 2.5121},
    },
}
# What else its training code can do, and this file can not.
SUPPORTED = {"num_frames": None, "sample_type": "uniform", "reward_token": "special"}

# Qwen2-VL-2B-Instruct; the size of the vocabulary is the checkpoint's.
QWEN2_VL_2B = {
    "text_config": {
        **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "rms_norm_eps": 1e-6},
        **{"num_attention_heads": 12, "num_key_value_heads": 2},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    },
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14},
}

# Of rewards with several scores: the paper's Setting B; A for the tiny world, whose scores are exact.
DEFAULT_WEIGHTS = {
    "tiny": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "tiny_videoalign": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0},
    "videoalign": {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
    "clipscore": {"CLIPScore": 1.0},
    "pickscore": {"PickScore": 1.0},
}


def composite(scores: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Weighted sum of the components, R = sum_k w_k S_k.

    A component without a weight is left out. NaN stays NaN: an unscored sample is not a sample of score 0.

    Args:
        scores: what a reward returned, name -> [B].
        weights: name -> weight; for VQ, MQ, TA the paper's Setting A is 1, 1, 1, its Setting B 0.5, 0.5, 1.

    Returns: [B], float32.
    Raises: ValueError without weights, or for a weight whose component the scores lack.

    >>> composite({"VQ": torch.tensor([1.0]), "TA": torch.tensor([2.0])}, {"VQ": 0.5, "TA": 1.0}).item()
    2.5
    """
    if not weights:
        raise ValueError(f"no weights for the scores {', '.join(sorted(scores))}")
    if missing := sorted(set(weights) - set(scores)):
        names = ", ".join(missing), ", ".join(sorted(scores))
        raise ValueError("there is a weight for {}, but the reward's scores are {}".format(*names))
    return sum(weight * scores[name].float() for name, weight in weights.items())


def parse_weights(text: str) -> dict[str, float]:
    """Weights of a composite from a line of text.

    Raises: ValueError for an entry that is not name=number, a number that is not finite, or a name twice.

    >>> parse_weights("VQ=0.5, MQ=0.5, TA=1")
    {'VQ': 0.5, 'MQ': 0.5, 'TA': 1.0}
    """
    weights: dict[str, float] = {}
    for entry in text.split(","):
        name, _, number = (part.strip() for part in entry.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or name in weights or not math.isfinite(value):
            raise ValueError(f"weights {text!r}: {entry.strip()!r} is not a new name=number, as VQ=0.5 is")
        weights[name] = value
    return weights


def score_finite(videos: Tensor, prompts: list[str], names: tuple, score: Callable) -> dict[str, Tensor]:
    """Scores of the samples that are finite; NaN, with a warning that names them, for the others.

    Args:
        videos: [B, F, 3, H, W], 0..1.
        prompts: B prompts.
        names: K components.
        score: from n finite videos and their prompts to [n, K].

    Returns: name -> [B], float32, on the device of the videos.
    Raises: ValueError for another shape, another number of prompts, or pixels outside 0..1.
    """
    if videos.ndim != 5 or videos.shape[2] != 3 or len(videos) != len(prompts):
        raise ValueError(f"need videos [B, F, 3, H, W], B prompts; got {[*videos.shape]}, {len(prompts)}")
    finite = videos.isfinite().flatten(1).all(1)
    for sample in (~finite).nonzero().flatten().tolist():
        warnings.warn(f"sample {sample} is not finite and scored NaN: {prompts[sample]!r}", stacklevel=3)
    scores = torch.full((len(videos), len(names)), math.nan, device=videos.device)
    if finite.any():
        clips = videos[finite]
        low, high = clips.amin().item(), clips.amax().item()
        if low < -0.01 or high > 1.01:  # a decoder overshoots a little; -1..1 and 0..255 are mistakes
            raise ValueError(f"videos must be in 0..1, got {low:.3g}..{high:.3g}")
        kept = [prompt for prompt, ok in zip(prompts, finite.tolist(), strict=True) if ok]
        scores[finite] = score(clips, kept).to(scores)
    return dict(zip(names, scores.unbind(1), strict=True))


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """Frames [N, 3, H, W] in 0..1 at another size, on the 8-bit levels of those who read them from a file."""
    levels = (frames.float().clamp(0, 1) * 255).round()
    # Bicubic overshoots at edges, hence the second clamp.
    return F.interpolate(levels, (height, width), mode="bicubic", antialias=True).clamp(0, 255).round() / 255


def standardize(frames: Tensor) -> Tensor:
    """(frames - mean) / std per colour, frames [N, 3, H, W]."""
    mean, std = (frames.new_tensor(values)[:, None, None] for values in (PIXEL_MEAN, PIXEL_STD))
    return (frames - mean) / std


def frame_indices(total: int, fps: float, sample_fps: float = 2.0) -> Tensor:
    """Frames that VideoAlign looks at: evenly spread, an even number, about `sample_fps` a second, 4 or more.

    The clip's own rate decides: 81 frames are 3.4 s at 24 fps and 10 s at 8, so they get other scores.

    Args:
        total: frames of the clip.
        fps: frames a second of the clip.

    Returns: [n], int64, from 0 to total - 1.
    Raises: ValueError for a clip of one frame, or a rate that is not positive.

    >>> [len(frame_indices(81, fps)) for fps in (24, 16, 8)]
    [6, 10, 20]
    """
    if total < 2 or fps <= 0:
        raise ValueError(f"VideoAlign needs 2 frames and a positive rate, got {total} frames at {fps} fps")
    count = min(max(total / fps * sample_fps, 4), total // 2 * 2)
    return torch.linspace(0, total - 1, round(count / 2) * 2).round().long()


def frame_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Size in multiples of `factor` with an area of min..max pixels and about the same aspect.

    >>> frame_size(480, 832, 28, 100_352, 200_704), frame_size(32, 32, 28, 100_352, 200_704)
    ((336, 588), (336, 336))
    """
    size = tuple(max(factor, round(side / factor) * factor) for side in (height, width))
    if size[0] * size[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        size = tuple(math.floor(side / shrink / factor) * factor for side in (height, width))
    elif size[0] * size[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        size = tuple(math.ceil(side * grow / factor) * factor for side in (height, width))
    return size


class VideoAlign(nn.Module):
    """VideoAlign (arXiv 2501.13918): Qwen2-VL reads a clip and criteria, a linear head scores three tokens.

        S_k = (rm_head(hidden at token k) - mean_k) / std_k        k = VQ, MQ, TA
        Overall = S_VQ + S_MQ + S_TA

    Attention is causal and the prompt comes after the VQ and MQ tokens: only TA depends on it, and VQ and MQ
    alone reward a fine video of anything. In bfloat16 differences below about 0.06 are noise.

    Called, it is a reward. To train one, build it from a config and use `raw_scores`.

    Args:
        config: a Qwen2VLConfig.
        tokenizer: has a padding token, the reward tokens, and <|video_pad|> as the config's video_token_id.
        criteria: text with {text_prompt} once and the reward tokens once each, in order.
        settings: sections data_config and inference_config of model_config.json.
        head_dim: 1, one row for the three tokens, or 3, one each.
        dtype: of Qwen2-VL; the head stays float32, as bfloat16 has steps of 1/64 at the size of a raw score.

    Raises: ValueError for other criteria, or a tokenizer that does not fit.
    """

    def __init__(self, config, tokenizer, criteria, settings=PUBLISHED, head_dim=1, dtype=torch.float32):
        from transformers import AutoModel

        super().__init__()
        if SPECIAL_TOKEN.findall(criteria) != REWARD_TOKENS or criteria.count("{text_prompt}") != 1:
            raise ValueError(f"criteria need {{text_prompt}} and, in order, {REWARD_TOKENS}: {criteria!r}")
        vocabulary, size, video = tokenizer.get_vocab(), config.text_config.vocab_size, config.video_token_id
        ids = {token: vocabulary.get(token) for token in (*REWARD_TOKENS, "<|video_pad|>")}
        if None in ids.values() or ids["<|video_pad|>"] != video or max(vocabulary.values()) >= size:
            model = f"<|video_pad|> {video} and {size} embeddings"
            raise ValueError(f"tokenizer and model do not fit: {ids}, {len(vocabulary)} tokens; {model}")
        self.tokenizer, self.criteria, self.settings = tokenizer, criteria, copy.deepcopy(settings)
        self.settings["data_config"] = {**PUBLISHED["data_config"], **settings.get("data_config", {})}
        self.reward_ids = [ids[token] for token in REWARD_TOKENS]
        self.model = AutoModel.from_config(config, dtype=dtype)  # without lm_head, as it writes nothing
        self.rm_head = nn.Linear(config.text_config.hidden_size, head_dim, bias=False, dtype=torch.float32)

    def pixel_rows(self, videos: Tensor, fps: float) -> tuple[Tensor, Tensor]:
        """Patches of the sampled frames as Qwen2-VL wants them, and the grid t, h, w of each clip.

        A row is one patch of two frames; the rows that Qwen2-VL merges to one token are neighbours.

        Returns: [B t h w, 3 * 2 * patch^2] and [B, 3].
        """
        vision, data = self.model.config.vision_config, self.settings["data_config"]
        patch, merge, depth = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        frames = videos[:, frame_indices(videos.shape[1], fps, data["fps"]).to(videos.device)]
        limits = data["min_frame_pixels"], data["max_frame_pixels"]
        height, width = frame_size(*videos.shape[-2:], patch * merge, *limits)
        pixels = standardize(resize(frames.flatten(0, 1), height, width))
        t, h, w = frames.shape[1] // depth, height // patch, width // patch
        blocks = pixels.view(len(videos), t, depth, 3, h // merge, merge, patch, w // merge, merge, patch)
        rows = blocks.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(len(videos) * t * h * w, -1)
        return rows, torch.tensor([[t, h, w]] * len(videos), device=videos.device)

    def token_ids(self, prompts: list[str], video_tokens: int) -> tuple[Tensor, Tensor]:
        """One user's turn of Qwen2-VL's chat, video first: ids and mask, [B, L], padded on the right.

        Raises: ValueError for a prompt with a special token: it would move the places that are read.
        """
        for prompt in prompts:
            if special := SPECIAL_TOKEN.search(prompt):
                raise ValueError(f"prompt {prompt!r} contains the special token {special[0]}")
        video = "<|vision_start|>" + "<|video_pad|>" * video_tokens + "<|vision_end|>"
        head = f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{video}"
        # The turn stays open: no reward token can see what follows it.
        texts = [head + self.criteria.replace("{text_prompt}", prompt) for prompt in prompts]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return tokens["input_ids"], tokens["attention_mask"]

    def raw_scores(self, videos: Tensor, prompts: list[str], fps: float) -> Tensor:
        """The head at the three reward tokens, differentiable in the weights.

        Args:
            videos: [B, F, 3, H, W], 0..1, finite, F at least 2.
            prompts: B prompts without special tokens.
            fps: frames a second of the videos.

        Returns: [B, 3] for VQ, MQ, TA, float32.
        """
        device = self.rm_head.weight.device
        rows, grid = self.pixel_rows(videos.to(device), fps)
        merged = self.model.config.vision_config.spatial_merge_size**2
        ids, mask = (x.to(device) for x in self.token_ids(prompts, int(grid[0].prod()) // merged))
        # The published weights were trained with one position for all three axes; given none, transformers
        # would compute Qwen2-VL's M-RoPE.
        positions = (mask.cumsum(-1) - 1).clamp(min=0).expand(3, -1, -1)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        hidden = self.model(**inputs, pixel_values_videos=rows, video_grid_thw=grid).last_hidden_state
        at_reward = torch.isin(ids, torch.tensor(self.reward_ids, device=device))
        read = self.rm_head(hidden[at_reward].float()).unflatten(0, (len(videos), 3))
        return read[..., 0] if read.shape[-1] == 1 else read.diagonal(dim1=1, dim2=2)

    @torch.no_grad()
    def forward(self, videos: Tensor, prompts: list[str], fps: float) -> dict[str, Tensor]:
        """VQ, MQ, TA and Overall, each [B], float32, in standard deviations of the raw scores."""
        names, unit = ("VQ", "MQ", "TA"), self.settings["inference_config"]
        raw = score_finite(videos, prompts, names, lambda clips, kept: self.raw_scores(clips, kept, fps))
        scores = {name: (raw[name] - unit[f"{name}_mean"]) / unit[f"{name}_std"] for name in names}
        return scores | {"Overall": scores["VQ"] + scores["MQ"] + scores["TA"]}

    def save(self, folder: str | Path) -> None:
        """Write what `load_videoalign` reads: config, settings, criteria, tokenizer and weights."""
        from safetensors.torch import save_file

        checkpoint = Path(folder) / "checkpoint-0"
        self.tokenizer.save_pretrained(checkpoint / "tokenizer")
        save_file(self.state_dict(), checkpoint / "model.safetensors")
        self.model.config.save_pretrained(folder)
        (checkpoint.parent / "model_config.json").write_text(json.dumps(self.settings, indent=2) + "\n")
        (checkpoint.parent / "criteria.txt").write_text(self.criteria, encoding="utf-8")


def read_criteria(path: str | Path) -> str:
    """VideoAlign's criteria text from its prompt_template.py, which is parsed and not run.

    Raises: ValueError if no string in the file has the hash of the text that the weights were trained with.
    """
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"), filename=str(path))):
        text = getattr(node, "value", None)
        if isinstance(text, str) and hashlib.sha256(text.encode()).hexdigest() == CRITERIA_SHA256:
            return text
    raise ValueError(
        f"{path} lacks VideoAlign's criteria, a text of sha256 {CRITERIA_SHA256[:12]}...: "
        "give the unchanged prompt_template.py of https://github.com/KwaiVGI/VideoAlign"
    )


def current_name(name: str) -> str:
    """A tensor's name in today's Qwen2-VL from its name under peft and transformers 4.

    >>> current_name("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight")
    'model.language_model.layers.0.mlp.up_proj.lora_A.weight'
    """
    name = name.removeprefix("base_model.model.").replace(".default.weight", ".weight")
    name = re.sub(r"^visual\.", "model.visual.", name)
    return re.sub(r"^model\.(?!visual\.|language_model\.)", "model.language_model.", name)


def read_tensors(checkpoint: Path, base: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint, under their current names.

    Either model.pth or model.safetensors, the whole model; or adapter_model.safetensors and
    non_lora_state_dict.pth, what was trained, over the safetensors of the base model.
    """
    from safetensors.torch import load_file

    load_pickle = partial(torch.load, map_location="cpu", mmap=True, weights_only=True)
    if (checkpoint / "model.pth").exists():
        parts = [load_pickle(checkpoint / "model.pth")]
    elif (checkpoint / "model.safetensors").exists():
        parts = [load_file(checkpoint / "model.safetensors")]
    elif (checkpoint / "adapter_model.safetensors").exists():
        parts = [load_file(shard) for shard in sorted(base.glob("*.safetensors"))]
        if not parts:
            raise ValueError(
                f"{checkpoint} is an adapter and {base} holds no weights: get Qwen2-VL-2B-Instruct, write "
                "its folder into model_config.json, as model_config.model_name_or_path"
            )
        parts += [load_pickle(checkpoint / "non_lora_state_dict.pth")]
        parts += [load_file(checkpoint / "adapter_model.safetensors")]
    else:
        raise ValueError(f"{checkpoint} has no model.pth, model.safetensors or adapter_model.safetensors")
    return {current_name(name): tensor for part in parts for name, tensor in part.items()}


def fold_lora(tensors: dict[str, Tensor], peft: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same tensors with each LoRA added to its layer, W + alpha / rank * B A, summed in float32.

    Args:
        tensors: under their current names.
        peft: section peft_lora_config of model_config.json.
        dtype: of the sums.

    Raises: ValueError for half a LoRA, a LoRA without a layer, or an unknown alpha.
    """
    folded = {re.sub(r"\.base_layer\.bias$", ".bias", name): tensor for name, tensor in tensors.items()}
    for layer in [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]:
        base = f"{layer}.base_layer" if f"{layer}.base_layer.weight" in folded else layer
        names = [f"{part}.weight" for part in (base, f"{layer}.lora_A", f"{layer}.lora_B")]
        if "lora_alpha" not in peft or not folded.keys() >= set(names):
            raise ValueError(f"{layer} lacks {names[0]}, {names[2]} or model_config.json's lora_alpha")
        weight, down, up = (folded.pop(name).float() for name in names)
        rank = math.sqrt(len(down)) if peft.get("use_rslora") else len(down)
        folded[f"{layer}.weight"] = (weight + peft["lora_alpha"] / rank * up @ down).to(dtype)
    return folded


def load_videoalign(folder: str | Path, criteria: str | None, device, dtype: torch.dtype) -> VideoAlign:
    """VideoAlign from a folder as published (KlingTeam/VideoReward), or as `VideoAlign.save` writes it.

    Of the 1,123 tensors of the published model.pth 730 are model and head, 392 are LoRA, and lm_head is not
    used. Every tensor of the model must be there, and every tensor that is there must have a place.

    Args:
        folder: model_config.json and checkpoint-*/ (the last is taken); config.json if it is not Qwen2-VL-2B.
        criteria: the text, from `read_criteria`; None reads it from criteria.txt in the folder.
        device, dtype: of Qwen2-VL; bfloat16 as published, float32 for less noise at twice the memory.

    Raises: ValueError for another layout; RuntimeError, naming them, for tensors that are missing, unknown or
        of another shape.
    """
    from accelerate import init_empty_weights
    from transformers import AutoTokenizer, Qwen2VLConfig

    folder = Path(folder)
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
    if not checkpoints or not (folder / "model_config.json").exists():
        raise ValueError(f"{folder} lacks model_config.json or checkpoint-*: give VideoReward's folder")
    if criteria is None and not (folder / "criteria.txt").exists():
        raise ValueError(f"{folder} has no criteria.txt: give VideoAlign's prompt_template.py as criteria")
    criteria = criteria or (folder / "criteria.txt").read_text(encoding="utf-8")
    settings = json.loads((folder / "model_config.json").read_text(encoding="utf-8"))
    training = settings.get("model_config", {})
    given = {**settings.get("data_config", {}), **training}
    other = {name: given[name] for name, value in SUPPORTED.items() if given.get(name, value) != value}
    if other or "inference_config" not in settings:
        raise ValueError(f"{folder}/model_config.json: {other or 'no inference_config'}; need {SUPPORTED}")

    # Joined to the folder, an absolute path stays as it is.
    tensors = read_tensors(checkpoints[-1], folder / (training.get("model_name_or_path") or "."))
    tensors = fold_lora(tensors, settings.get("peft_lora_config", {}), dtype)
    tensors.pop("lm_head.weight", None)
    embedding, head = "model.language_model.embed_tokens.weight", "rm_head.weight"
    if embedding not in tensors or head not in tensors:
        raise ValueError(f"{checkpoints[-1]}: no {embedding} or no {head} among {sorted(tensors)[:4]}...")
    own = (folder / "config.json").exists()
    config = Qwen2VLConfig.from_pretrained(folder) if own else Qwen2VLConfig(**QWEN2_VL_2B)
    config.text_config.vocab_size = len(tensors[embedding])
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[-1] / "tokenizer")
    with init_empty_weights():  # drawing two billion random numbers first takes minutes on a CPU
        reward = VideoAlign(config, tokenizer, criteria, settings, len(tensors[head]), dtype)
    tensors = {name: x.to(torch.float32 if name == head else dtype) for name, x in tensors.items()}
    reward.load_state_dict(tensors, assign=True)
    return reward.to(device).eval()


def clip_cosine(model: nn.Module, tokenizer: Callable, videos: Tensor, prompts: list[str]) -> Tensor:
    """Cosine of each frame with the prompt in CLIP's embedding space.

    Frames are resized by their short side and cut to the centre square; a prompt is cut at CLIP's 77 tokens.

    Args:
        model, tokenizer: a CLIPModel of transformers and its tokenizer.
        videos: [B, F, 3, H, W], 0..1.
        prompts: B prompts.

    Returns: [B, F], float32, -1..1.
    """
    length, side = model.config.text_config.max_position_embeddings, model.config.vision_config.image_size
    tokens = tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt")
    tokens = tokens.to(model.device)
    # In two steps, as get_text_features returns a tensor in transformers 4 and an object in 5.
    texts = model.text_projection(model.text_model(**tokens).pooler_output).float()
    height, width = (side * x // min(videos.shape[-2:]) for x in videos.shape[-2:])
    top, left = (height - side) // 2, (width - side) // 2
    cosines = []
    for video, text in zip(videos.to(model.device), texts, strict=True):
        frames = standardize(resize(video, height, width)[..., top : top + side, left : left + side])
        images = model.visual_projection(model.vision_model(frames.to(model.dtype)).pooler_output).float()
        cosines.append(F.cosine_similarity(images, text, dim=-1))
    return torch.stack(cosines)


@torch.no_grad()
def clip_reward(videos: Tensor, prompts: list[str], fps: float, *, model, tokenizer, scales: dict) -> dict:
    """CLIP's cosine with the prompt on each named scale, mean over all frames; the rate plays no part."""

    def score(clips: Tensor, kept: list[str]) -> Tensor:
        cosine = clip_cosine(model, tokenizer, clips, kept)
        return torch.stack([scale(cosine).mean(1) for scale in scales.values()], 1)

    return score_finite(videos, prompts, tuple(scales), score)


def load_clip(name: str, source: str | None, device, dtype: torch.dtype) -> Reward:
    """CLIPScore or PickScore, by which the paper evaluates: a folder with model and tokenizer, or a hub id.

        clipscore: CLIP_cosine, CLIPScore = 2.5 max(cosine, 0), CLIPScore_100/30 = 100 cosine / 30
        pickscore: Pick_cosine, PickScore = exp(logit_scale) cosine / 26

    The paper names neither checkpoint nor scale; its Table 2 is in the range of all three. 2.5 is that of
    arXiv 2104.08718 (here without its prefix "A photo depicts"); 100/30 and /26 are flow_grpo's.
    """
    from transformers import AutoTokenizer, CLIPModel

    pick = name == "pickscore"
    source = source or ("yuvalkirstain/PickScore_v1" if pick else "openai/clip-vit-large-patch14")
    model = CLIPModel.from_pretrained(source, dtype=dtype).to(device).eval()
    # On the hub PickScore goes with the tokenizer of the model that it was tuned from.
    on_hub = pick and not Path(source).is_dir()
    tokenizer = AutoTokenizer.from_pretrained("laion/CLIP-ViT-H-14-laion2B-s32B-b79K" if on_hub else source)
    factor = model.logit_scale.float().exp().item() / 26
    scales = {"Pick_cosine": lambda cosine: cosine, "PickScore": lambda cosine: factor * cosine}
    if not pick:
        scales = {"CLIP_cosine": lambda cosine: cosine, "CLIPScore": lambda cosine: 2.5 * cosine.clamp(min=0)}
        scales["CLIPScore_100/30"] = lambda cosine: 100 / 30 * cosine
    return partial(clip_reward, model=model, tokenizer=tokenizer, scales=scales)


ALIASES = {"tiny": "tiny.world:reward", "tiny_videoalign": "tiny.world:learned_reward"}


def load_reward(
    name: str, model: str | None = None, criteria: str | None = None, device="cpu", dtype=None
) -> Reward:
    """A reward by its name, or a function of your own as module:function.

    Args:
        name: tiny, tiny_videoalign, videoalign, clipscore, pickscore, or module:function for any to import.
        model: folder of the weights; for clipscore and pickscore a hub id too, or None for the usual one.
        criteria: prompt_template.py from a checkout of VideoAlign; None if the folder has a criteria.txt.
        device, dtype: of the models loaded here; None is bfloat16 for videoalign, float32 for the other two.

    Returns: a callable reward(videos, prompts, fps) -> {name: [B] tensor}.
    Raises: ValueError for a name that is none of these, or for a file that it lacks or does not take.

    >>> load_reward("math:prod").__name__
    'prod'
    """
    if name == "videoalign":
        if model is None:
            raise ValueError("reward 'videoalign' needs model, the folder of KlingTeam/VideoReward")
        return load_videoalign(model, criteria and read_criteria(criteria), device, dtype or torch.bfloat16)
    if name in ("clipscore", "pickscore"):
        return load_clip(name, model, device, dtype or torch.float32)
    module_name, _, attribute = ALIASES.get(name, name).partition(":")
    if not module_name or not attribute:
        known = ", ".join([*ALIASES, "videoalign", "clipscore", "pickscore"])
        raise ValueError(f"no reward {name!r}: choose one of {known}, or module:function")
    if model or criteria:
        raise ValueError(f"reward {name!r} takes no model and no criteria, got {model!r} and {criteria!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; one that it imports is not
        raise ValueError(f"reward {name!r}: there is no module {module_name!r}") from error
    if not callable(reward := getattr(module, attribute, None)):
        raise ValueError(f"reward {name!r}: module {module_name!r} has no callable {attribute!r}")
    return reward
