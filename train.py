"""Post-trains HunyuanVideo 1.5 by SAGE-GRPO (arXiv 2603.21872).

    torchrun train.py                                      the tiny model on the tiny world, on any machine
    torchrun --nproc_per_node=2 train.py                   the same on two processes, with the same result
    torchrun --nproc_per_node=8 train.py --model ID ...    the real one; the README has the commands
    python train.py --resume runs/001                      goes on where a run stopped

One iteration: sample a group of videos per prompt with the exploring SDE, score them, turn scores into
advantages within each group, replay the recorded steps with gradient, and take an optimizer step inside the
trust region.

Differences from the paper and from the released code (README has the reasons): both levels of a step are
clamped; the last step is the ODE's and is not trained; the velocity term is a closed form against the policy
before the last update; the KL weight rises when the KL is above its target, once per update and for all
ranks; a reward that fails masks its sample.
"""

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from config import Config, compute_dtype, kl_weight, parse
from evaluate import Setting, mean_and_error, named_reward, pairs_of, read_prompts, score, score_pairs, shown
from grpo import group_advantage, policy_loss
from hunyuan import Policy, load_pipeline
from processes import World, clear_errors, gather_units, max_over_ranks, mean_over_ranks, start, stop
from reward import DEFAULT_WEIGHTS, composite, parse_weights
from rollout import Rollout, Sampler
from run_folder import RunFolder
from sde import log_prob
from trust_region import Anchor, gaussian_kl, log_prob_kl

MEASURED = ("ratio", "clip_fraction", "policy_loss", "kl_position", "kl_velocity", "kl", "velocity_grad_norm")


class Trainer:
    """A run's state, and what an iteration does with it.

    Args:
        config: the options.
        world: this process.

    Raises: ValueError for options that do not fit the model, the files or the processes.
    """

    def __init__(self, config: Config, world: World):
        if config.units % world.size:
            raise ValueError(
                f"{config.units} micro-batches (prompts_per_iteration {config.prompts_per_iteration} x "
                f"group_size {config.group_size} / micro_batch {config.micro_batch}) do not divide by "
                f"{world.size} processes"
            )
        self.config, self.world = config, world
        prompts = [prompt for prompt, _ in read_prompts(config.prompts)]
        held_out = read_prompts(config.eval_prompts) if config.eval_seeds else []
        self.pairs = pairs_of(held_out, config.eval_seeds)
        self.reward = named_reward(config.reward, config.criteria, "cpu" if config.offload else world.device)
        if config.offload and not isinstance(self.reward, torch.nn.Module):
            raise ValueError(f"--offload needs a reward that is a torch module; {config.reward} is none")
        self.weights = parse_weights(config.reward_weights) if config.reward_weights else {}
        self.weights = self.weights or DEFAULT_WEIGHTS.get(config.reward.partition("@")[0], {})

        torch.manual_seed(config.seed)  # of the LoRA's first values
        dtype = compute_dtype(config.precision, world.device.type == "cuda")
        pipeline = load_pipeline(config.model, dtype, masters=config.adaptation == "full")
        self.policy = Policy(pipeline, world.device, config.guidance, config.attention)
        self.sampler = Sampler(config, world, self.policy, prompts)
        self.policy.encode([*prompts, *(prompt for prompt, _ in self.pairs)])
        self.policy.adapt(config.adaptation, config.lora_rank, config.lora_alpha)
        self.policy.shard(dtype, config.checkpointing)

        parameters = self.policy.parameters
        self.optimizer = torch.optim.AdamW(
            parameters, config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.99)
        )
        for parameter in parameters:  # from the start, so that a checkpoint always has them
            zeros = [torch.zeros_like(parameter) for _ in range(2)]
            self.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": zeros[0],
                "exp_avg_sq": zeros[1],
            }
        place = torch.device("cpu") if config.offload_anchors else world.device
        self.anchors = {role: Anchor(parameters, place) for role in config.anchors}
        self.kl_weight = kl_weight(config)
        self.updates = 0
        size = self.sampler.shape, config.fps, config.micro_batch
        self.setting = Setting(config.eval_steps, self.sampler.shift, *size)

    @contextmanager
    def reward_at_work(self) -> Iterator[None]:
        """The reward model is on the device inside, and with --offload on the CPU outside."""
        if self.config.offload:
            self.reward.to(self.world.device)
        yield
        if self.config.offload:
            self.reward.to("cpu")

    def try_reward(self) -> None:
        """Scores one video of noise; ValueError if the reward or its weights fail, before expensive work."""
        noise = torch.randn(1, *self.sampler.shape, device=self.world.device)
        prompt, fps = self.sampler.prompts[:1], self.config.fps
        with self.reward_at_work():
            self.total(score(self.reward, self.policy.decode(noise), prompt, fps))

    @torch.no_grad()
    def scores(self, rollout: Rollout) -> dict[str, Tensor]:
        """Scores of all samples of all ranks, {name: [P, G]}, NaN where a sample could not be scored."""
        tables = []
        for prompt, latents in zip(rollout.prompts, rollout.latents[:, -1], strict=True):
            videos = self.policy.decode(latents)
            result = score(self.reward, videos, [prompt] * len(videos), self.config.fps)
            tables.append(torch.stack(list(result.values()), 1))
        gathered = gather_units(torch.stack(tables))  # [P G / m, m, names]
        groups = gathered.flatten(0, 1).unflatten(0, (-1, self.config.group_size))
        return dict(zip(result, groups.unbind(-1), strict=True))

    def total(self, scores: dict[str, Tensor]) -> Tensor:
        """The scalar reward: the weighted sum of the scores; a user's reward without weights gets 1 each."""
        return composite(scores, self.weights or dict.fromkeys(scores, 1.0))

    def advantage(self, scores: dict[str, Tensor]) -> Tensor:
        """Advantages, [P, G]: of the weighted sum, or the weighted sum of each score's (DanceGRPO's way)."""
        eps, total = self.config.advantage_eps, self.total(scores)
        if self.config.aggregate == "before":
            return group_advantage(total, eps=eps)
        weights = self.weights or dict.fromkeys(scores, 1.0)
        parts = [w * group_advantage(scores[name], total.isfinite(), eps) for name, w in weights.items()]
        return torch.stack(parts).sum(0)

    @torch.no_grad()
    def reference_means(self, rollout: Rollout) -> dict[str, Tensor]:
        """Means of the trained steps under each anchor that differs from the policy, each [U, S, m, ...]."""
        means = {}
        for roles in self.config.references(self.updates):
            with self.policy.at(self.anchors[roles[0]]):
                pairs = itertools.product(range(len(rollout.prompts)), rollout.trained)
                replays = torch.stack([self.sampler.replay(rollout, *pair) for pair in pairs])
            means |= dict.fromkeys(roles, replays.unflatten(0, (-1, len(rollout.trained))))
        return means

    def update(self, rollout: Rollout, advantage: Tensor, preflight: bool) -> dict | None:
        """One optimizer step on the roll-out (Eq. 43).

        Args:
            rollout: this rank's.
            advantage: of this rank's units, [U, m].
            preflight: the policy is still the one that sampled, so the ratio must be 1.

        Returns: what it measured, averaged over ranks; None if no sample and no KL gives a gradient.
        Raises: ValueError, on all ranks alike, if a preflight fails or a gradient is not finite.
        """
        config = self.config
        means = self.reference_means(rollout)
        units = range(len(rollout.prompts))
        if not means and (config.kl == "none" or config.velocity_kl == "gaussian"):
            # Only advantages give a gradient now; FSDP needs as many passes on every rank, so others fill up.
            useful = [unit for unit in units if advantage[unit].any()]
            most = int(max_over_ranks(len(useful)))
            units = (useful + [unit for unit in units if unit not in useful])[:most]
        if not units:
            return None
        table = torch.zeros(len(rollout.trained), len(MEASURED), dtype=torch.float64)
        worst = torch.zeros(len(rollout.trained), dtype=torch.float64)
        count = len(rollout.prompts) * len(
            rollout.trained
        )  # those not replayed count too; FSDP averages ranks
        for row, step in enumerate(rollout.trained):
            for unit in units:
                mean = self.sampler.replay(rollout, unit, step)
                mean.retain_grad()
                references = {role: rows[unit, row] for role, rows in means.items()}
                loss, measured = self.step_loss(rollout, unit, step, mean, advantage[unit], references)
                (loss / count).backward()
                gradient = rollout.schedule.b[step] * mean.grad.norm().cpu()
                table[row] += torch.stack([*measured, gradient.square()]).double()
                worst[row] = torch.maximum(worst[row], measured[0].log().abs())
        table = mean_over_ranks(table) / len(units)
        if preflight:
            self.check_ratio(rollout.trained, worst)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters, config.max_grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(norm):
            raise ValueError(f"the gradient of update {self.updates + 1} is not finite")
        self.take_step()
        measured = {"grad_norm": norm, "kl_weight": self.kl_weight.value if config.kl != "none" else 0.0}
        measured["steps"] = rollout.trained
        for name, values in zip(MEASURED, table.T.tolist(), strict=True):
            measured[name] = sum(values) / len(values)
            measured[f"{name}_per_step"] = values
        self.kl_weight.update(measured["kl"])
        return measured

    def step_loss(self, rollout, unit, step, mean, advantage, references) -> tuple[Tensor, list[Tensor]]:
        """Loss of one unit at one step (Eq. 43), and its parts in the order of MEASURED.

        The first part is the ratio that is furthest from 1.
        """
        config, std = self.config, rollout.schedule.std[step]
        old = rollout.log_prob_old[unit, step]
        new = log_prob(rollout.latents[unit, step + 1], mean, std)
        gain = rollout.schedule.gain[step]
        policy = policy_loss(new, old, advantage.to(new.device), gain, config.clip_range)
        position = velocity = torch.zeros_like(policy)
        if "position" in references:
            position = gaussian_kl(mean, references["position"], std).mean()
        if "velocity" in references:
            velocity = gaussian_kl(mean, references["velocity"], std).mean()
        elif config.kl in ("stepwise", "dual") and config.velocity_kl == "log_prob":
            velocity = log_prob_kl(old, new).mean()
        kl = config.beta_pos * position + config.beta_vel * velocity
        loss = policy if config.kl == "none" else policy + self.kl_weight.value * kl
        log_ratio = (new - old).detach().double()
        furthest = log_ratio[log_ratio.abs().argmax()].exp()
        clipped = ((log_ratio.exp() - 1).abs() > config.clip_range).double().mean()
        return loss, [value.detach().cpu() for value in (furthest, clipped, policy, position, velocity, kl)]

    def check_ratio(self, trained: list[int], worst: Tensor) -> None:
        """Before the first change of the weights the replay must be the roll-out: its ratio must be 1."""
        worst = torch.tensor([max_over_ranks(value) for value in worst.tolist()])
        limit = self.config.clip_range / 10
        say(self.world, f"preflight: the largest log ratio before the first update is {worst.max():.1e}")
        if not worst.max() <= limit:
            step = trained[int(worst.nan_to_num(torch.inf).argmax())]
            raise ValueError(
                f"preflight failed: at step {step} the log ratio is {worst.max():.1e}, above {limit:.0e} "
                "(a tenth of --clip_range) before any weight has changed: the replay is not the roll-out"
            )

    def take_step(self) -> None:
        """The optimizer's step, and the anchors that follow it."""
        if "velocity" in self.anchors:
            self.anchors["velocity"].refresh()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.policy.reshard()
        self.updates += 1
        if self.config.kl in ("moving", "dual") and self.updates % self.config.anchor_every == 0:
            self.anchors["position"].refresh()

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a checkpoint keeps as tensors, to be saved or filled in place."""
        result = {}
        for i, parameter in enumerate(self.policy.parameters):
            result[f"policy.{i}"] = parameter.detach()
            result |= {
                f"optimizer.{i}.{name}": value for name, value in self.optimizer.state[parameter].items()
            }
        for role, anchor in self.anchors.items():
            result |= {f"{role}.{i}": value for i, value in anchor.state_dict().items()}
        return result

    def progress(self) -> dict:
        """Everything that a checkpoint keeps as numbers."""
        return {
            "updates": self.updates,
            "kl_weight": self.kl_weight.state_dict(),
            "threads": torch.get_num_threads(),
        }

    def restore(self, progress: dict) -> None:
        """Takes the numbers of a checkpoint."""
        self.updates = progress["updates"]
        self.kl_weight.load_state_dict(progress["kl_weight"])
        self.policy.reshard()
        was, now = progress["threads"], torch.get_num_threads()
        if was != now:
            say(
                self.world,
                f"warning: {was} threads before, {now} now: not bit for bit the same run",
            )


def say(world: World, line: str) -> None:
    """A line on the screen, once, above the progress bar."""
    if world.is_main:
        tqdm.write(line)


def evaluate(trainer: Trainer, folder: RunFolder, iteration: int) -> None:
    """Held-out scores after so many iterations, against those before the first, on disk and on the screen."""
    config, first = trainer.config, shown(trainer.pairs)

    def show(pair: tuple[str, int], video: Tensor) -> None:
        if pair in first and iteration in (0, config.iterations):
            name = f"{first.index(pair)}_{'after' if iteration else 'before'}"
            folder.save_video(name, video, config.fps)

    run = score_pairs(trainer.policy, trainer.world, trainer.reward, trainer.pairs, trainer.setting, show)
    bar = tqdm(run, "held out", len(trainer.pairs), leave=False, disable=not trainer.world.is_main)
    with trainer.reward_at_work():
        done = list(bar)
    scores = {name: torch.tensor([each.scores[name] for each in done]).double() for name in done[0].scores}
    scores["reward"] = trainer.total(scores)
    if iteration == 0 and not scores["reward"].isfinite().any():
        raise ValueError(f"the reward could score none of the {len(done)} held-out videos")
    small = torch.stack([each.thumbnails for each in done if each.pair in first])
    folder.save_evaluation(iteration, {**scores, "thumbnails": small})
    before = folder.load_evaluation(0)
    table = {name: mean_and_error(values) for name, values in scores.items()}
    paired = {name: mean_and_error(values - before[name]) for name, values in scores.items()}
    folder.log(kind="evaluation", iteration=iteration, scores=table, paired=paired)
    columns = {"before": before["thumbnails"], f"after {iteration} iterations": small}
    folder.save_contact_sheet([prompt for prompt, _ in first], columns)
    folder.save_curves()
    say(trainer.world, f"held out after {iteration} iterations, {len(done)} pairs:")
    for name, value in table.items():
        change = (
            f"{paired[name]['mean']:+.3f} +- {paired[name]['error']:.3f} of the pairs" if iteration else ""
        )
        say(trainer.world, f"  {name:<10} {value['mean']:+.3f} +- {value['error']:.3f}  {change}")


def iterate(trainer: Trainer, iteration: int, preflight: bool) -> dict:
    """Roll out, score, update: one iteration, and what it measured."""
    config, world, seconds = trainer.config, trainer.world, {}
    clock, passes = time.perf_counter(), trainer.policy.passes

    def lap(phase: str) -> None:
        nonlocal clock
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds[phase], clock = round(time.perf_counter() - clock, 3), time.perf_counter()

    rollout = trainer.sampler.roll_out(iteration)
    lap("roll_out")
    with trainer.reward_at_work():
        scores = trainer.scores(rollout)
    advantage = trainer.advantage(scores)
    mine = advantage.reshape(-1, config.micro_batch)[world.rank :: world.size]
    lap("decode_and_score")
    for update in range(config.updates_per_iteration):
        measured = trainer.update(rollout, mine, preflight and update == 0)
    lap("update")
    sample_steps = mine.numel() * len(rollout.trained) * config.updates_per_iteration
    scores["reward"] = trainer.total(scores)
    if not scores["reward"].isfinite().any():
        say(world, f"warning: the reward could score no sample of iteration {iteration + 1}")
    spread = {name: group_std(values) for name, values in scores.items()}
    return {
        **{name: mean_and_error(values.flatten())["mean"] for name, values in scores.items()},
        **{f"{name}_spread": mean_and_error(values)["mean"] for name, values in spread.items()},
        "below_floor": (spread["reward"] < config.advantage_eps).double().mean().item(),
        "flat_groups": (advantage == 0).all(1).double().mean().item(),
        "invalid": 1 - scores["reward"].isfinite().double().mean().item(),
        **(measured or {}),
        "passes_per_sample_step": (trainer.policy.passes - passes) / sample_steps,
        "passes_per_sample_step_released": sum(config.released_passes.values()),
        "seconds": seconds,
    }


def group_std(values: Tensor) -> Tensor:
    """Standard deviation within each group, [P] from [P, G], of the finite values alone."""
    mean = values.masked_fill(~values.isfinite(), torch.nan).nanmean(1, keepdim=True)
    return (values - mean).square().masked_fill(~values.isfinite(), torch.nan).nanmean(1).sqrt()


def run(config: Config, resume: Path | None, world: World) -> None:
    """The whole run, from the first iteration or from the last checkpoint."""
    trainer = Trainer(config, world)
    trainer.try_reward()
    silent = (trainer.sampler.schedule.std == 0).nonzero()[:, 0].tolist()
    say(
        world,
        f"{config.method}: {config.steps - len(silent)} of {config.steps} steps explore; ODE steps: {silent}",
    )
    if resume is None:
        folder = RunFolder.create(Path(config.runs), config.name, dataclasses.asdict(config), world.is_main)
        done = 0
    else:
        folder = RunFolder(resume, world.is_main)
        progress = folder.load_checkpoint(trainer.tensors())
        done = progress["iteration"] if progress else 0
        if progress:
            trainer.restore(progress)
        folder.forget_after(done)
        folder.save_config(dataclasses.asdict(config))
    say(
        world,
        f"run {folder.path}: iterations {done} to {config.iterations} on {world.size} x {world.device.type}",
    )
    try:
        if config.eval_seeds and done == 0:
            evaluate(trainer, folder, 0)
        bar = tqdm(
            range(done, config.iterations), initial=done, total=config.iterations, disable=not world.is_main
        )
        for iteration in bar:
            metrics = iterate(trainer, iteration, preflight=iteration == done)
            done_now = iteration + 1
            folder.log(kind="iteration", iteration=done_now, **metrics)
            bar.set_postfix(reward=f"{metrics['reward']:.3f}")
            last = done_now == config.iterations
            if config.eval_seeds and (last or done_now % config.eval_every == 0):
                evaluate(trainer, folder, done_now)
            if last or done_now % config.save_every == 0:
                progress = {"iteration": done_now, **trainer.progress()}
                folder.save_checkpoint(done_now, trainer.tensors(), progress, config.keep)
    except KeyboardInterrupt:
        say(world, f"stopped; go on with --resume {folder.path}")
        raise SystemExit(130) from None
    folder.save_curves()
    result = folder.path / ("lora" if config.adaptation == "lora" else "transformer")
    trainer.policy.export(result, world.is_main)
    say(world, f"done: the result is {result}, its course {folder.path / 'curves.png'}")


def main() -> None:
    """The command line."""
    with clear_errors():
        config, resume = parse(sys.argv[1:], __doc__)
        run(config, resume, start(config.device))
    stop()


if __name__ == "__main__":
    main()
