"""What a run writes, and that a kill at any moment leaves the last good state."""

import json

import pytest
import torch

from run_folder import RunFolder, contact_sheet, curves, thumbnails


def test_runs_are_numbered_and_never_overwritten(world, tmp_path):
    names = [RunFolder.create(tmp_path, "", {"seed": i}, True).path.name for i in range(3)]
    assert names == ["001", "002", "003"]
    assert json.loads((tmp_path / "002" / "config.json").read_text()) == {"seed": 1}
    RunFolder.create(tmp_path, "mine", {}, True)
    with pytest.raises(ValueError, match="mine exists already"):
        RunFolder.create(tmp_path, "mine", {}, True)


def test_a_folder_that_a_process_cannot_see(world, tmp_path, monkeypatch):
    """As on a node whose disks are its own: said at the start, and not by a checkpoint that is half there."""
    monkeypatch.setattr("run_folder.max_over_ranks", lambda missing: 1.0)
    with pytest.raises(ValueError, match="must be on disks that all nodes share"):
        RunFolder.create(tmp_path, "", {}, True)


def test_only_the_main_process_writes(world, tmp_path):
    folder = RunFolder(tmp_path, is_main=False)
    folder.log(kind="iteration", iteration=1)
    folder.save_curves()
    folder.forget_after(0)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_forgets_what_was_not_saved(world, tmp_path):
    folder = RunFolder(tmp_path, True)
    for iteration in range(1, 6):
        folder.log(kind="iteration", iteration=iteration)
    folder.forget_after(3)
    folder.log(kind="iteration", iteration=4)
    assert [line["iteration"] for line in folder.metrics()] == [1, 2, 3, 4]


def test_checkpoints_are_whole_or_not_there(world, tmp_path, monkeypatch):
    """The last ones are kept; one that was being written when the run died is not taken for a checkpoint."""
    folder, value = RunFolder(tmp_path, True), torch.zeros(3)
    assert folder.load_checkpoint({"value": value}) is None
    for iteration in (1, 2, 3):
        folder.save_checkpoint(
            iteration, {"value": torch.full((3,), float(iteration))}, {"n": iteration}, keep=2
        )
    assert sorted(path.name[-1] for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("run_folder.dcp.save", die)
    with pytest.raises(KeyboardInterrupt):
        folder.save_checkpoint(4, {"value": value}, {"n": 4}, keep=2)
    assert folder.load_checkpoint({"value": value}) == {"n": 3}
    assert value.tolist() == [3.0, 3.0, 3.0]


def test_thumbnails_are_small_and_span_the_clip():
    videos = torch.linspace(0, 1, 9)[:, None, None, None].expand(1, 9, 3, 480, 848)
    small = thumbnails(videos)
    assert small.shape == (1, 5, 3, 96, 170)
    assert small[0, :, 0, 0, 0].tolist() == [0, 64, 128, 191, 255]


def test_a_video_plays_back(world, tmp_path):
    import imageio.v3 as iio

    video = torch.zeros(9, 3, 32, 32)
    video[:, 0, 8:24, 8:24] = 0.8
    RunFolder(tmp_path, True).save_video("clip", video, fps=8)
    frames = torch.from_numpy(iio.imread(tmp_path / "videos" / "clip.mp4"))
    assert frames.shape == (9, 256, 256, 3)
    assert (frames[4, ::8, ::8, 0] / 255 - video[4, 0]).abs().mean() < 0.03


def test_figures_are_drawn_from_what_was_logged():
    """With and without an evaluation or a KL; the sheet has a row a prompt."""
    step = {"kind": "iteration", "reward": 1.0, "verifier": 0.5, "kl_position": 0.0, "kl_weight": 0.1}
    steps = [{**step, "iteration": i, "grad_norm": 1.0 + i} for i in range(3)]
    held_out = {
        "kind": "evaluation",
        "iteration": 2,
        "scores": {"VQ": {"mean": 0.1}, "verifier": {"mean": 0.4}},
    }
    for lines in ([], steps, [*steps, held_out], [held_out]):
        assert len(curves(lines).axes) == 6
    sheet = contact_sheet(["one", "two"], {"a": torch.rand(2, 5, 3, 8, 8), "b": torch.rand(2, 5, 3, 8, 8)})
    assert len(sheet.axes) == 4
