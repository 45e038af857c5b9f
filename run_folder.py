"""What a run leaves on disk, written as it goes.

runs/001/config.json        the options it was started with
         metrics.jsonl      a line an iteration, a line a held-out evaluation
         curves.png         the same as curves
         before_after.png   contact sheet of fixed (prompt, seed) pairs, before and now
         videos/            the same as mp4
         evaluations/       held-out scores, pair by pair
         checkpoints/       the last few, written beside and renamed: a kill leaves the last good one
         lora/ or transformer/   the result, for diffusers
"""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor

from processes import from_main, max_over_ranks

CHECKPOINT = "iteration_{:06d}"
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#777777"


class RunFolder:
    """A run's folder; only the main process writes, but for checkpoints and videos.

    Args:
        path: an existing folder.
        is_main: whether this process writes what is written once.
    """

    def __init__(self, path: Path, is_main: bool):
        self.path, self.is_main = path, is_main

    @classmethod
    def create(cls, runs: Path, name: str, config: dict, is_main: bool) -> "RunFolder":
        """A new folder under `runs`; without a name it gets the next number. Call it on every rank.

        Raises: ValueError if the name is taken: a run is never overwritten.
        """
        folder = cls(new_folder(runs, is_main, name), is_main)
        folder.save_config(config)
        return folder

    def save_config(self, config: dict) -> None:
        """The options, as they are from now on."""
        if self.is_main:
            (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def log(self, **values) -> None:
        """Appends a line to metrics.jsonl."""
        if self.is_main:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(values) + "\n")

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl so far."""
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def forget_after(self, iteration: int) -> None:
        """Drops what a killed run logged after the checkpoint it is continued from."""
        if self.is_main:
            kept = [json.dumps(line) + "\n" for line in self.metrics() if line["iteration"] <= iteration]
            unfinished = self.path / ".metrics.jsonl"
            unfinished.write_text("".join(kept))
            unfinished.replace(self.path / "metrics.jsonl")

    def save_evaluation(self, iteration: int, tensors: dict[str, Tensor]) -> None:
        """Held-out scores, pair by pair, and thumbnails."""
        if self.is_main:
            folder = self.path / "evaluations"
            folder.mkdir(exist_ok=True)
            save_file(
                {name: values.contiguous() for name, values in tensors.items()},
                folder / f"{iteration:06d}.safetensors",
            )
        dist.barrier()

    def load_evaluation(self, iteration: int) -> dict[str, Tensor]:
        """What `save_evaluation` wrote."""
        return load_file(self.path / "evaluations" / f"{iteration:06d}.safetensors")

    def save_checkpoint(self, iteration: int, tensors: dict[str, Tensor], progress: dict, keep: int) -> None:
        """Writes a checkpoint on all ranks, then gives it its name, then drops all but the last `keep`."""
        folder = self.path / "checkpoints"
        unfinished = folder / f".{CHECKPOINT.format(iteration)}"
        if self.is_main:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        dcp.save(tensors, checkpoint_id=unfinished)
        if self.is_main:
            (unfinished / "progress.json").write_text(json.dumps(progress) + "\n")
            target = folder / CHECKPOINT.format(iteration)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
            for old in sorted(folder.glob("iteration_*"))[:-keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load_checkpoint(self, tensors: dict[str, Tensor]) -> dict | None:
        """Fills the tensors in place from the last checkpoint, on any number of ranks.

        Returns: its progress, or None if there is no checkpoint yet.
        """
        folders = sorted((self.path / "checkpoints").glob("iteration_*"))
        if not folders:
            return None
        dcp.load(tensors, checkpoint_id=folders[-1])
        return json.loads((folders[-1] / "progress.json").read_text())

    def save_video(self, name: str, video: Tensor, fps: int) -> None:
        """An mp4 of one video, [F, C, H, W] in 0...1; small ones are enlarged, since codecs smear them."""
        import imageio.v3 as iio

        folder = self.path / "videos"
        folder.mkdir(exist_ok=True)
        frames = (video.permute(0, 2, 3, 1) * 255).round().byte().cpu()
        enlarge = max(1, 256 // max(frames.shape[1:3]))
        frames = frames.repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
        iio.imwrite(folder / f"{name}.mp4", frames.numpy(), fps=fps, macro_block_size=2)

    def save_contact_sheet(self, prompts: list[str], columns: dict[str, Tensor]) -> None:
        """before_after.png: a row a prompt, a block of frames a column.

        Args:
            prompts: N prompts.
            columns: title to [N, F, C, H, W] in 0...1, the frames to show.
        """
        if self.is_main:
            figure = contact_sheet(prompts, columns)
            figure.savefig(self.path / "before_after.png", dpi=110)

    def save_curves(self) -> None:
        """curves.png from metrics.jsonl."""
        if self.is_main:
            figure = curves(self.metrics())
            figure.savefig(self.path / "curves.png", dpi=110)


def new_folder(parent: Path, is_main: bool, name: str = "") -> Path:
    """A new folder of a name, or of the next number; the same on every rank.

    Raises: ValueError, on every rank, if the name is taken, or if a rank cannot see the folder.
    """
    made = None
    if is_main:
        parent.mkdir(parents=True, exist_ok=True)
        numbers = [int(folder.name) for folder in parent.iterdir() if folder.name.isdecimal()]
        path = parent / (name or f"{max(numbers, default=0) + 1:03d}")
        if not path.exists():
            path.mkdir()
            made = path
    made = from_main(made)
    if made is None:
        raise ValueError(f"{parent / name} exists already; choose another name, or go on with what is there")
    if max_over_ranks(not made.is_dir()):
        raise ValueError(
            f"{made} is not seen by all processes: {parent} must be on disks that all nodes share"
        )
    return made


def thumbnails(videos: Tensor, frames: int = 5, height: int = 96) -> Tensor:
    """A few frames of each video, at most `height` pixels high: [N, frames, C, h, w], uint8."""
    chosen = torch.linspace(0, videos.shape[1] - 1, frames).round().long()
    shown = videos[:, chosen]
    step = -(-shown.shape[-2] // height)
    return (shown[..., ::step, ::step] * 255).round().byte().cpu()


def contact_sheet(prompts: list[str], columns: dict[str, Tensor]):
    """Figure of thumbnails: a row a prompt, a block a column, see `RunFolder.save_contact_sheet`."""
    from matplotlib.figure import Figure

    shape = next(iter(columns.values())).shape
    aspect = shape[-1] * shape[1] / shape[-2]
    figure = Figure(figsize=(min(0.8 * aspect, 5) * len(columns) + 0.3, len(prompts) + 0.4))
    axes = figure.subplots(len(prompts), len(columns), squeeze=False)
    for row, prompt in enumerate(prompts):
        for axis, (title, videos) in zip(axes[row], columns.items(), strict=True):
            strip = videos[row].permute(2, 0, 3, 1).flatten(1, 2)  # frames side by side, [H, F W, C]
            axis.imshow(strip.numpy())
            for i in range(1, shape[1]):
                axis.axvline(i * shape[-1] - 0.5, color="white", linewidth=1)
            axis.set_axis_off()
            if row == 0:
                axis.set_title(title, fontsize=9)
        axes[row][0].text(0, -0.06, prompt[:90], fontsize=7, va="top", transform=axes[row][0].transAxes)
    figure.tight_layout(h_pad=0.9, w_pad=0.3)
    return figure


def curves(metrics: list[dict]):
    """Figure of a run's course, from the lines of metrics.jsonl."""
    from matplotlib.figure import Figure

    trained = [line for line in metrics if line["kind"] == "iteration"]
    held_out = [line for line in metrics if line["kind"] == "evaluation"]
    figure = Figure(figsize=(11, 6))
    panels = figure.subplots(2, 3).flat

    def draw(axis, lines: list[dict], *keys: str, **style) -> None:
        points = [(line["iteration"], line) for line in lines]
        for key in keys:
            where = [(i, line[key]) for i, line in points if line.get(key) is not None]
            axis.plot([i for i, _ in where], [y for _, y in where], **{"label": key, **style})

    reward, components, verifier, kl, weight, gradient = panels
    draw(reward, trained, "reward", color=GREY, linewidth=1, label="roll-outs")
    reward.set(title="reward", ylabel="weighted sum of the scores")
    verifier.set(title="verifier (never trained on)", ylabel="share right")
    for name in sorted(held_out[0]["scores"]) if held_out else []:
        axis = {"reward": reward, "verifier": verifier}.get(name, components)
        points = [(line["iteration"], line["scores"][name]["mean"]) for line in held_out]
        label = name if axis is components else "held out, by the ODE"
        number = len(axis.lines)
        look = "os^Dv"[number % 5] + ("-", "--", ":")[number % 3]  # to be told apart in grey
        axis.plot(*zip(*points, strict=True), look, label=label)
    components.set(title="components, held out", ylabel="score")
    draw(verifier, trained, "verifier", color=GREY, linewidth=1, label="roll-outs")
    draw(kl, trained, "kl_position", color=BLUE, label="position: to the anchor")
    draw(kl, trained, "kl_velocity", color=ORANGE, linestyle="--", label="velocity: to the previous policy")
    kl.set(title="KL", ylabel="nats per element")
    kl.set_yscale("symlog", linthresh=1e-6)
    draw(weight, trained, "kl_weight", color=ORANGE)
    weight.set(title="KL weight", ylabel="per element")
    draw(gradient, trained, "grad_norm", color=BLUE)
    gradient.set(title="gradient norm before clipping", ylabel="of all trained parameters", yscale="log")
    for axis in (reward, components, verifier, kl, weight, gradient):
        axis.set_xlabel("iteration")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, framealpha=0.5)
    figure.tight_layout()
    return figure
