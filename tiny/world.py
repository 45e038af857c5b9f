"""A world of captioned clips in which a reward can be exact: one coloured shape on a dark ground.

A clip has 9 frames of 32x32 at 8 fps; its caption is "a red square moves left" or "a red square stays still".
`render` draws clips, `reward` scores them as VideoAlign does (VQ, MQ, TA) and `verify` says, by other means,
whether a clip shows its caption. Shapes: B clips, F frames, C = 3 colours, H = W = 32; pixels in 0...1.
Depends on torch alone, but for `learned_reward`, which asks a trained model and can be hacked.
"""

import itertools
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
DIRECTIONS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
    "still": (0.0, 0.0),
}
CAPTIONS = tuple(
    f"a {colour} {shape} {'stays' if motion == 'still' else 'moves'} {motion}"
    for colour, shape, motion in itertools.product(PALETTE, SHAPES, DIRECTIONS)
)

GROUND, AREA, DISTANCE = (
    (0.04, 0.10),
    (75.0, 115.0),
    (8.0, 10.0),
)  # what `render` draws: level, pixels, pixels
# Mean and standard deviation of the raw scores over good and spoiled clips: reference_clips in the tests.
REFERENCE = {"VQ": (-0.5437, 0.6163), "MQ": (-0.7039, 0.7603), "TA": (-1.2443, 1.3495)}
EPS = 1e-3


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


def render(captions: list[str], generator: torch.Generator, shortfall: float = 0.0) -> Tensor:
    """Clips of the captions, with random size, place, speed and ground.

    Args:
        captions: B captions.
        generator: a CPU generator; the same state draws the same clips.
        shortfall: paint is dimmer, shapes smaller, motions slower by random shares of up to this.

    Returns: [B, 9, 3, 32, 32], float32, 0...1.
    """
    time = torch.linspace(-0.5, 0.5, FRAMES)[:, None]
    clips = []
    for caption in captions:
        colour, shape, motion = parse_caption(caption)
        area, distance, ground, *offset = torch.rand(5, generator=generator).tolist()
        light, scale, tempo = (
            1 - shortfall * torch.rand(3, generator=generator) if shortfall else torch.ones(3)
        ).tolist()
        middle = SIZE / 2 + 3 * (torch.tensor(offset) - 0.5)
        centre = middle + tempo * (8 + 2 * distance) * time * torch.tensor(DIRECTIONS[motion])
        covered = coverage(shape, torch.full((FRAMES,), scale * (75 + 40 * area)), centre)[:, None]
        paint = light * torch.tensor(PALETTE[colour])[:, None, None]
        clips.append(covered * paint + (1 - covered) * (0.04 + 0.06 * ground))
    return torch.stack(clips)


def words(captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
    """Number of the colour and of the shape, both [B], and the direction, [B, 2], of each caption."""
    colours, shapes, motions = zip(*map(parse_caption, captions), strict=True)
    return (
        torch.tensor([list(PALETTE).index(colour) for colour in colours]),
        torch.tensor([SHAPES.index(shape) for shape in shapes]),
        torch.tensor([DIRECTIONS[motion] for motion in motions]),
    )


class Seen(NamedTuple):
    """What the reward sees of a clip; in pixels, or squared differences of colour (black to white: 3)."""

    area: Tensor  # [B, F]
    centre: Tensor  # [B, F, 2]
    pixels: Tensor  # [B, F, 3, H, W], the clip less its ground
    ground: Tensor  # [B], squared distance of the commonest colour from the greys of `render`
    off: Tensor  # [B, F], mean squared distance to what the palette can paint on this ground
    stray: Tensor  # [B, F, 4], share of the paint's energy that a colour can't explain
    soft: Tensor  # [B, F], half-covered pixels over the root of the area
    misfit: Tensor  # [B, F, 3], squared difference to a shape of equal area and centroid, per area


def perceive(videos: Tensor) -> Seen:
    """Area, place, colours and shape of what was painted in every frame.

        cover = clamp((share - .1) / .8, 0, 1),  share = <x - ground, colour - ground> / |colour - ground|^2

    An edge pixel is a mixture of ground and colour, so the palette is four segments, not five points. The
    dead zone keeps noise of the ground out of the area: .03 in 900 pixels would add 28; being symmetric it
    leaves the area inside an edge alone.

    Args:
        videos: [B, F, 3, 32, 32], finite.
    """
    tone = (
        videos[..., ::2, ::2].transpose(1, 2).flatten(2).median(-1).values
    )  # a quarter says as much, faster
    ground = tone.mean(-1).clamp(*GROUND)[:, None, None]
    pixels = videos - ground[..., None, None]
    paint = torch.tensor(list(PALETTE.values())) - ground
    energy = pixels.square().sum(2)
    along = (paint[:, None] @ pixels.flatten(3)).unflatten(-1, (SIZE, SIZE))
    norm = paint.square().sum(-1)[:, None, :, None, None]
    cover = ((along / norm - 0.1) / 0.8).clamp(0, 1)
    missed = energy[:, :, None] + cover * (cover * norm - 2 * along)
    off, best = missed.min(2)
    cover = cover.gather(2, best[:, :, None])[:, :, 0]
    lost, paid = (cover[:, :, None] * missed).sum((-2, -1)), (cover * energy).sum((-2, -1))

    area = cover.sum((-2, -1))
    grid = torch.arange(SIZE) + 0.5
    share = cover / (area + EPS)[..., None, None]
    blank = EPS / (area + EPS) * SIZE / 2  # an empty frame's centroid is the middle
    centre = torch.stack([(share.sum(-2) * grid).sum(-1) + blank, (share.sum(-1) * grid).sum(-1) + blank], -1)
    ideal = torch.stack([coverage(shape, area + EPS, centre) for shape in SHAPES], 2)
    return Seen(
        area=area,
        centre=centre,
        pixels=pixels,
        ground=(tone - ground[:, 0]).square().sum(-1),
        off=off.mean((-2, -1)),
        stray=(lost + EPS) / (paid + EPS)[..., None],  # nothing painted: nothing explained
        soft=4 * (cover * (1 - cover)).sum((-2, -1)) / (area + 1).sqrt(),
        misfit=(cover[:, :, None] - ideal).square().sum((-2, -1)) / (area + 1)[..., None],
    )


def moved_back(frames: Tensor, step: Tensor) -> Tensor:
    """Frames shifted by -step, bilinear, with zeros from outside.

    Two small matrices a frame, since grid_sample's backward may crash on a NaN.

    Args:
        frames: [B, T, C, H, W].
        step: (x, y) in pixels, [B, T, 2].
    """
    index = torch.arange(SIZE)
    hat = (1 - (index - index[:, None] - step[..., None, None]).abs()).clamp(min=0)
    return hat[:, :, None, 1] @ frames @ hat[:, :, None, 0].transpose(-1, -2)


def log_tail(excess: Tensor, scale: float) -> Tensor:
    """Log of a factor that falls from 1 to 0 as a power, so that the worst samples never tie.

    log(1 / (1 + (max(excess, 0) / scale)^2))
    """
    return -torch.log1p((excess.clamp(min=0) / scale).square())


def mean_and_worst(logs: Tensor) -> Tensor:
    """Half the mean over frames and half the worst frame, [B] from [B, F]: one torn frame can't hide."""
    return (logs.mean(1) + logs.amin(1)) / 2


def presence(seen: Seen) -> Tensor:
    """Log factor of an object that is no smaller than `render` draws, [B, F]."""
    return log_tail(AREA[0] - seen.area, 10)


def visual_quality(seen: Seen) -> Tensor:
    """Mean of log factors, [B]: palette, sharp edges, a shape, its size, one colour, dark ground."""
    everywhere = torch.zeros_like(seen.area)
    factors = [
        log_tail(seen.off, 0.005),  # noise of .03 costs .2
        log_tail(seen.soft - 3.4, 0.8),  # an antialiased edge has at most about 3.4
        log_tail(seen.misfit.amin(2), 0.02),  # a circle taken for a square has .09, a triangle .26
        log_tail(seen.area - AREA[1], 6) + presence(seen),
        log_tail(seen.stray.mean(1).amin(1), 0.05)[:, None] + everywhere,
        log_tail(seen.ground, 0.01)[:, None] + everywhere,
    ]
    return torch.stack([mean_and_worst(factor) for factor in factors]).mean(0)


def motion_quality(seen: Seen) -> Tensor:
    """Mean of log factors, [B]: no jolt, no leap, no flicker, constant area; a still clip is perfect."""
    step = seen.centre.diff(dim=1)
    jolt = (step.diff(dim=1).square().sum(-1).mean(1) + 1e-8).sqrt()
    speed = (step.square().sum(-1).amax(1) + 1e-8).sqrt()
    change = (moved_back(seen.pixels[:, 1:], step) - seen.pixels[:, :-1]).square().sum((2, 3, 4))
    change = change / (seen.pixels.square().sum((2, 3, 4)).mean(1, keepdim=True) + EPS)
    breath = (seen.area.var(1) + 1e-8).sqrt() / (seen.area.mean(1) + 1)
    factors = [
        log_tail(jolt, 0.3),
        log_tail(speed - 1.5, 0.7),  # `render` moves by 1 to 1.25 pixels a frame
        log_tail(change.mean(1) - 0.02, 0.06),  # shifting by part of a pixel blurs: up to .012 of the energy
        log_tail(change.amax(1) - 0.03, 0.12),
        log_tail(breath, 0.08),
        presence(seen).amin(1),
    ]
    return torch.stack(factors).mean(0)


def text_alignment(seen: Seen, prompts: list[str]) -> Tensor:
    """Mean of log factors, [B]: the caption's colour, shape, displacement, and the place in every frame."""
    colour, shape, heading = words(prompts)
    row = torch.arange(len(prompts))
    time = torch.linspace(-0.5, 0.5, seen.area.shape[1])[:, None]
    travel = (seen.centre * time).sum(1) / time.square().sum()
    ideal = (travel * heading).sum(-1, keepdim=True).clamp(*DISTANCE) * heading
    short = ((travel - ideal).square().sum(-1) + 1e-8).sqrt()
    path = seen.centre.mean(1, keepdim=True) + ideal[:, None] * time
    detour = ((seen.centre - path).square().sum(-1).mean(1) + 1e-8).sqrt()
    factors = [
        mean_and_worst(log_tail(seen.stray[row, :, colour], 0.05)),
        mean_and_worst(log_tail(seen.misfit[row, :, shape], 0.02)),
        log_tail(short, 1.0),
        log_tail(detour, 0.5),
    ]
    return torch.stack(factors).mean(0)


def raw_scores(videos: Tensor, prompts: list[str]) -> dict[str, Tensor]:
    """VQ, MQ and TA before the normalisation, each [B], 0 for a perfect clip; only TA is told the prompt."""
    seen = perceive(videos)
    return {"VQ": visual_quality(seen), "MQ": motion_quality(seen), "TA": text_alignment(seen, prompts)}


def reward(videos: Tensor, prompts: list[str], fps: float = FPS) -> dict[str, Tensor]:
    """Visual quality, motion quality and text alignment in VideoAlign's units, and the verdict of `verify`.

        score = (mean of log factors - mean of the reference) / std of the reference

    So a rendered clip has about +1 and one spoiled in every way about -1. "verifier" is to be logged, never
    trained on. Runs on the CPU, which at this size is no slower, and answers on the videos' device.

    Args:
        videos: [B, F, 3, 32, 32], 0...1, at least 3 frames.
        prompts: B captions.
        fps: frames a second; part of the interface, unused: a caption's motion takes the whole clip.

    Returns: VQ, MQ, TA, verifier, each [B]; NaN for a clip that is not finite.
    Raises: ValueError for videos of another shape, or a prompt that is no caption.
    """
    shape = videos.shape
    if len(shape) != 5 or shape[0] != len(prompts) or shape[1] < 3 or shape[2:] != (3, SIZE, SIZE):
        raise ValueError(f"videos {list(shape)} for {len(prompts)} prompts; expected [B, F, 3, 32, 32]")
    device, videos = videos.device, videos.float().cpu()
    finite = videos.sum((1, 2, 3, 4)).isfinite()
    videos = torch.where(finite[:, None, None, None, None], videos, 0.0)
    scores = {}
    for name, raw in raw_scores(videos, prompts).items():
        mean, std = REFERENCE[name]
        scores[name] = (raw - mean) / std
    scores["verifier"] = verify(videos, prompts)
    return {name: torch.where(finite, score, torch.nan).to(device) for name, score in scores.items()}


@torch.no_grad()
def verify(videos: Tensor, prompts: list[str]) -> Tensor:
    """1 where a clip shows its caption, else 0: by counts, boxes and moments, sharing nothing with `reward`.

    Args:
        videos: [B, F, 3, 32, 32], 0...1.
        prompts: B captions.

    Returns: [B], float32.
    """
    colour, shape, heading = words(prompts)
    device, videos = videos.device, videos.float().cpu()
    bright = videos.amax(2)
    mask = bright > 0.45  # half covered, for each of the colours
    area = mask.sum((-2, -1)).float()
    lone = (bright > 0.25).sum((-2, -1)) < 1.75 * area
    sane = (area > 60) & (area < 135) & (area.amax(1) < 1.35 * area.amin(1))[:, None]

    row, painted = torch.arange(len(prompts)), torch.tensor(list(PALETTE.values()))
    distance = torch.cdist(painted, videos.movedim(2, -1).flatten(2, 3)).unflatten(-1, (SIZE, SIZE))
    own = distance[row, :, colour]
    named = mask & (own <= distance.amin(2)) & (own < 0.3)
    right_colour = named.sum((-2, -1)) > 0.55 * area  # the rest may be edge

    moments, fill = [], area
    for counts in (mask.sum(-2), mask.sum(-1)):
        there = (counts > 0).int()
        fill = fill / (SIZE - there.argmax(-1) - there.flip(-1).argmax(-1))
        mean = (counts * torch.arange(SIZE)).sum(-1) / area
        away = torch.arange(SIZE) - mean[..., None]
        moments.append((mean, (counts * away**2).sum(-1) / area, (counts * away**3).sum(-1) / area))
    (x, var_x, _), (y, var_y, third_y) = moments
    # Exact values for square, circle, triangle: fill 1, .79, .5; spread .167, .159, .194; lean 0, 0, -.57.
    whole = ((var_x + var_y) / area < 0.22) & (fill > 0.75 * fill.mean(1, keepdim=True))
    fill, spread = fill.mean(1), ((var_x + var_y) / area).mean(1)
    lean, slim = (third_y / var_y**1.5).mean(1), (var_x / var_y).mean(1)
    upright = lean.abs() < 0.15
    square = upright & (fill > 0.86) & (spread > 0.161) & (spread < 0.172) & (slim > 0.75) & (slim < 1.33)
    circle = upright & (fill > 0.65) & (fill < 0.92) & (spread < 0.162) & (slim > 0.8) & (slim < 1.25)
    triangle = (lean < -0.38) & (fill < 0.72) & (spread > 0.174) & (slim > 0.6) & (slim < 0.9)
    right_shape = torch.stack([square, circle, triangle])[shape, row]

    heading = heading[:, None]
    place = torch.stack([x, y], -1)
    ahead = (place * heading).sum(-1)
    across = place - ahead[..., None] * heading
    aside = (across - across.mean(1, keepdim=True)).norm(dim=-1)
    step, net = ahead.diff(dim=1), ahead[:, -1] - ahead[:, 0]
    moving = heading.abs().sum((1, 2)) > 0
    arrived = torch.where(moving, (net > 6.5) & (net < 11.5), True)
    right_motion = arrived & (step > -0.5).all(1) & (step < 2.5).all(1) & (aside < 0.8).all(1)

    frames = (lone & sane & whole & right_colour).all(1) & videos.sum((1, 2, 3, 4)).isfinite()
    return (frames & right_shape & right_motion).float().to(device)


@cache
def learned_scorer():
    """The tiny VideoAlign of `tiny/build.py`, loaded once."""
    from reward import load_videoalign

    return load_videoalign(Path(__file__).with_name("videoalign"), None, "cpu", torch.float32)


def learned_reward(videos: Tensor, prompts: list[str], fps: float = FPS) -> dict[str, Tensor]:
    """What a tiny VideoAlign makes of the clips, and the verdict of `verify`: to watch a reward being hacked.

    The model was trained to rank spoiled clips as `reward` does and has never seen what a policy finds. While
    its scores rise and "verifier", to be logged and never trained on, does not follow, it is being hacked.

    Args:
        videos: [B, F, 3, 32, 32], 0...1, at least 3 frames.
        prompts: B captions.
        fps: frames a second, of which the model looks at 8.

    Returns: VQ, MQ, TA, Overall, verifier, each [B]; NaN for a clip that is not finite.
    Raises: ValueError for videos of another shape, pixels outside 0...1, or a prompt that is no caption.
    """
    scores = learned_scorer()(videos, prompts, fps)
    finite = scores["Overall"].isfinite()
    return scores | {"verifier": torch.where(finite, verify(videos, prompts), torch.nan)}
