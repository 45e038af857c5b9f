"""A world of captioned clips in which a reward can be exact: one coloured shape on a dark ground.

A clip has 9 frames of 32x32 at 8 fps; its caption is "a red square moves left" or "a red square stays still".
`render` draws clips, `reward` scores them as VideoAlign does (VQ, MQ, TA) and `verify` says, by other means, whether a
clip shows its caption. Shapes: B clips, F frames, C = 3 colours, H = W = 32; pixels in 0...1. Depends on torch alone.
"""

import itertools
import math

import torch
from torch import Tensor

FRAMES, SIZE, FPS = 9, 32, 8
PALETTE = {
    "red": (0.90, 0.15, 0.15),
    "green": (0.15, 0.80, 0.20),
    "blue": (0.20, 0.35, 0.95),
    "yellow": (0.95, 0.85, 0.15),
}
SHAPES = ("square", "circle", "triangle")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0), "still": (0.0, 0.0)}
CAPTIONS = tuple(
    f"a {colour} {shape} {'stays' if motion == 'still' else 'moves'} {motion}"
    for colour, shape, motion in itertools.product(PALETTE, SHAPES, DIRECTIONS)
)


def parse_caption(caption: str) -> tuple[str, str, str]:
    """Colour, shape and motion that a caption names.

    Raises: ValueError for a sentence that is not of this world.

    >>> parse_caption("a red square moves left")
    ('red', 'square', 'left')
    """
    if caption not in CAPTIONS:
        raise ValueError(f"{caption!r} is no caption of the tiny world; one of them is {CAPTIONS[0]!r}")
    _, colour, shape, _, motion = caption.split()
    return colour, shape, motion


def coverage(shape: str, area: Tensor, centre: Tensor) -> Tensor:
    """Share of each pixel that an upright shape covers, antialiased over one pixel.

        coverage = clamp(1/2 - signed distance to the edge, 0, 1)

    Args:
        shape: one of SHAPES; the triangle is as wide as it is high and points up.
        area: in pixels, [...].
        centre: centroid (x, y) in pixels, [..., 2].

    Returns: [..., 32, 32]
    """
    grid = torch.arange(SIZE) + 0.5
    dx = grid - centre[..., 0, None, None]
    dy = grid[:, None] - centre[..., 1, None, None]
    area = area[..., None, None]
    if shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - area.sqrt() / 2
    elif shape == "circle":
        distance = torch.hypot(dx, dy) - (area / math.pi).sqrt()
    else:
        height = (2 * area).sqrt()
        side = (2 * dx.abs() - dy - 2 / 3 * height) / math.sqrt(5)
        distance = torch.maximum(side, dy - height / 3)
    return (0.5 - distance).clamp(0, 1)


def render(captions: list[str], generator: torch.Generator) -> Tensor:
    """Clips of the captions, with random size, place, speed and ground.

    Args:
        captions: B captions.
        generator: a CPU generator; the same state draws the same clips.

    Returns: [B, 9, 3, 32, 32], float32, 0...1.
    """
    time = torch.linspace(-0.5, 0.5, FRAMES)[:, None]
    clips = []
    for caption in captions:
        colour, shape, motion = parse_caption(caption)
        area, distance, ground, *offset = torch.rand(5, generator=generator).tolist()
        middle = SIZE / 2 + 3 * (torch.tensor(offset) - 0.5)
        centre = middle + (8 + 2 * distance) * time * torch.tensor(DIRECTIONS[motion])
        covered = coverage(shape, torch.full((FRAMES,), 75 + 40 * area), centre)[:, None]
        paint = torch.tensor(PALETTE[colour])[:, None, None]
        clips.append(covered * paint + (1 - covered) * (0.04 + 0.06 * ground))
    return torch.stack(clips)
