"""Rewards for videos: VideoAlign, CLIPScore, PickScore, their weighted sum, or a function of your own.

A reward is any callable `reward(videos, prompts, fps) -> {name: [B] tensor}`, with videos [B, F, C, H, W] in 0..1.
A sample that it cannot score is NaN, never a default score.

    reward = load_reward("videoalign", model="VideoReward", criteria="VideoAlign/prompt_template.py")
    scores = reward(videos, prompts, fps=24)                      # {"VQ": [B], "MQ": [B], "TA": [B], "Overall": [B]}
    total = composite(scores, parse_weights("VQ=0.5,MQ=0.5,TA=1"))  # [B], the paper's Setting B

Depends on torch; the loaders also need transformers and safetensors. Copy this file.
"""

import importlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

ALIASES = {"tiny": "tiny.world:reward", "tiny_videoalign": "tiny.world:learned_reward"}
LOADERS: dict[str, Callable] = {}


def composite(scores: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    """Weighted sum of the components, R = sum_k w_k S_k.

    A component without a weight is left out; NaN stays NaN, so that an unscored sample is not a sample of score 0.

    Args:
        scores: what a reward returned, name -> [B].
        weights: name -> weight; the paper's Setting A is 1, 1, 1 for VQ, MQ, TA and its Setting B 0.5, 0.5, 1.

    Returns: [B], float32.
    Raises: ValueError without weights, or for a weight whose component the scores lack.

    >>> composite({"VQ": torch.tensor([1.0]), "TA": torch.tensor([2.0])}, {"VQ": 0.5, "TA": 1.0}).item()
    2.5
    """
    missing = sorted(set(weights) - set(scores))
    if missing or not weights:
        raise ValueError(
            f"weights {weights} need components {missing or 'named'}; the scores are {sorted(scores)}"
        )
    return sum(weight * scores[name].float() for name, weight in weights.items())


def parse_weights(text: str) -> dict[str, float]:
    """Weights of a composite from a line of text.

    Raises: ValueError for an entry that is not name=number, a number that is not finite, or a name given twice.

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
        if not name or not math.isfinite(value):
            raise ValueError(
                f"weight {entry.strip()!r} in {text!r} is not name=number, as in VQ=0.5,MQ=0.5,TA=1"
            )
        if name in weights:
            raise ValueError(f"weight {name!r} is given twice in {text!r}")
        weights[name] = value
    return weights


def load_reward(
    name: str,
    model: str | None = None,
    criteria: str | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[Tensor, list[str], float], dict[str, Tensor]]:
    """A reward by its name, or a function of your own as module:function.

    Args:
        name: tiny, tiny_videoalign, videoalign, clipscore, pickscore, or module:function for any importable callable.
        model: folder of the weights (videoalign, clipscore, pickscore) or hub id (clipscore, pickscore).
        criteria: videoalign's prompt_template.py, from a checkout of VideoAlign.
        device, dtype: where and in what precision a loaded model runs; a module:function chooses for itself.

    Returns: a callable reward(videos, prompts, fps) -> {name: [B] tensor}.
    Raises: ValueError for a name that is none of these, naming it.
    """
    if name in LOADERS:
        return LOADERS[name](model, criteria, device, dtype)
    module_name, _, attribute = ALIASES.get(name, name).partition(":")
    if not module_name or not attribute:
        allowed = ", ".join([*ALIASES, *LOADERS])
        raise ValueError(f"unknown reward {name!r}: choose one of {allowed}, or module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise ValueError(f"reward {name!r}: there is no module {module_name!r} to import") from error
    reward = getattr(module, attribute, None)
    if not callable(reward):
        raise ValueError(f"reward {name!r}: {module_name!r} has no callable {attribute!r}")
    return reward
