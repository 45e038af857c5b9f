"""Sampling an iteration: its schedule, the roll-out that records every step, and the replay of a step.

A `Rollout` holds all that a replay needs, so that nothing is derived twice: sigmas, coefficients, latents and
log-probabilities. Work comes in units, micro-batches of m samples of one prompt; rank r of R takes units r,
r + R, ..., so the shapes of the passes, and with them their rounding, are the same for any R.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from config import Config
from equalizer import equalizer_gain, gradient_norm
from hunyuan import Policy
from processes import World, seeded_generator
from sde import log_prob, sde_step, shifted_sigmas, step_coefficients


class Schedule(NamedTuple):
    """The steps of a roll-out, all float64: x_next = a x + b velocity + std noise."""

    sigmas: Tensor  # [T + 1]
    a: Tensor  # [T]
    b: Tensor  # [T]
    std: Tensor  # [T], 0 where a step is the ODE's
    gain: Tensor  # [T], the equalizer's, 0 where a step is the ODE's


def full_schedule(config: Config, shift: float) -> Schedule:
    """Every step that can explore does.

    Raises: ValueError if none can, or fewer than the options want.
    """
    sigmas = shifted_sigmas(config.steps, config.shift or shift)
    a, b, std = step_coefficients(config.method, sigmas, config.eta, config.sde_last_step)
    explores = std > 0
    wanted = max(1, config.sde_window, config.trained_steps)
    if explores.sum() < wanted:
        options = f"--method {config.method} --steps {config.steps} --eta {config.eta}"
        raise ValueError(f"{options}: {int(explores.sum())} steps explore, at least {wanted} must")
    gain = torch.zeros_like(std)
    gain[explores] = (
        equalizer_gain(gradient_norm(b[explores].abs(), std[explores])) if config.equalizer else 1.0
    )
    return Schedule(sigmas, a, b, std, gain)


def iteration_schedule(config: Config, full: Schedule, iteration: int) -> tuple[Schedule, list[int]]:
    """The schedule of one iteration and the steps it trains, the same for all samples and ranks.

    Outside a window (MixGRPO) a step is the ODE's. The gain stays that of the full schedule.
    """
    exploring = full.std.nonzero()[:, 0]
    generator = seeded_generator(config.seed, "steps", iteration)
    if config.trained_steps:
        chosen = exploring[torch.randperm(len(exploring), generator=generator)[: config.trained_steps]]
        return full, sorted(chosen.tolist())
    if not config.sde_window:
        return full, exploring.tolist()
    first = int(torch.randint(len(exploring) - config.sde_window + 1, (1,), generator=generator))
    window = exploring[first : first + config.sde_window]
    explores = torch.zeros(config.steps, dtype=torch.bool)
    explores[window] = True
    ode = step_coefficients("ode", full.sigmas, 0)
    a, b, std = (torch.where(explores, ours, its) for ours, its in zip(full[1:4], ode, strict=True))
    return Schedule(full.sigmas, a, b, std, torch.where(explores, full.gain, 0.0)), window.tolist()


@dataclass(frozen=True)
class Rollout:
    """What a rank sampled in an iteration, U units of m samples, and all that a replay needs."""

    schedule: Schedule
    trained: list[int]  # the S steps to replay
    prompts: list[str]  # [U]
    latents: Tensor  # [U, T + 1, m, C, F, H, W], float32
    log_prob_old: Tensor  # [U, T, m], 0 where a step is the ODE's


class Sampler:
    """Roll-outs of a policy, the same for any number of processes.

    Args:
        config: the options.
        world: this process.
        policy: whose velocity is sampled.
        prompts: to draw from.

    Raises: ValueError for a size that the model cannot have, or a schedule that does not explore.
    """

    def __init__(self, config: Config, world: World, policy: Policy, prompts: list[str]):
        self.config, self.world, self.policy, self.prompts = config, world, policy, prompts
        self.shape = policy.latent_shape(config.frames, config.height, config.width)
        self.shift = config.shift or policy.shift
        self.schedule = full_schedule(config, self.shift)

    def noise(self, samples: Iterable[int], *key: int | str) -> Tensor:
        """Standard normal noise of some samples, [m, C, F, H, W].

        A function of the run's seed, the iteration, the prompt's slot, the sample and the step alone, so a
        run depends neither on the number of processes nor on a restart.
        """
        draws = [seeded_generator(self.config.seed, *key, sample) for sample in samples]
        return torch.stack([torch.randn(self.shape, generator=draw) for draw in draws]).to(self.world.device)

    def units(self, iteration: int) -> list[tuple[int, str, range]]:
        """This rank's units of an iteration: slot, prompt and samples. Prompts go round in shuffled order."""
        config = self.config
        chunks = config.group_size // config.micro_batch
        result = []
        for unit in range(self.world.rank, config.units, self.world.size):
            slot, chunk = divmod(unit, chunks)
            epoch, place = divmod(iteration * config.prompts_per_iteration + slot, len(self.prompts))
            order = torch.randperm(
                len(self.prompts), generator=seeded_generator(config.seed, "prompts", epoch)
            )
            samples = range(chunk * config.micro_batch, (chunk + 1) * config.micro_batch)
            result.append((slot, self.prompts[order[place]], samples))
        return result

    @torch.no_grad()
    def roll_out(self, iteration: int) -> Rollout:
        """Samples this rank's units with the exploring SDE, and records every step."""
        schedule, trained = iteration_schedule(self.config, self.schedule, iteration)
        units = self.units(iteration)
        latents, log_probs = [], []
        for slot, prompt, samples in units:
            first = [0] * len(samples) if self.config.same_initial_noise else samples
            x = self.noise(first, iteration, slot, "initial")
            path, scores = [x], []
            for step, (sigma, a, b, std) in enumerate(zip(*schedule[:4], strict=False)):
                noise = self.noise(samples, iteration, slot, step)
                x, mean = sde_step(x, self.policy.velocity(x, sigma, prompt), a, b, std, noise)
                path.append(x)
                scores.append(log_prob(x, mean, std) if std > 0 else torch.zeros_like(x[:, 0, 0, 0, 0]))
            latents.append(torch.stack(path))
            log_probs.append(torch.stack(scores))
        prompts = [prompt for _, prompt, _ in units]
        return Rollout(schedule, trained, prompts, torch.stack(latents), torch.stack(log_probs))

    def replay(self, rollout: Rollout, unit: int, step: int) -> Tensor:
        """Mean of a recorded step under the parameters as they are now, [m, C, F, H, W]."""
        schedule, x = rollout.schedule, rollout.latents[unit, step]
        velocity = self.policy.velocity(x, schedule.sigmas[step], rollout.prompts[unit])
        return sde_step(
            x, velocity, schedule.a[step], schedule.b[step], schedule.std[step], torch.zeros_like(x)
        )[1]
