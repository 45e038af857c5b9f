"""Builds the tiny HunyuanVideo 1.5 and the tiny VideoAlign from nothing.

    python -m tiny.build --out tiny/hunyuan
    python -m tiny.build --part videoalign --out tiny/videoalign

Every class is the real one of diffusers and transformers, only smaller, and a folder has the layout of the
published HunyuanVideo 1.5 or VideoReward, so whatever loads the one loads the other. The text encoders are
random and stay so (a fixed vector for every word); the VAE and the transformer are trained on the clips of
`tiny/world.py`, VideoAlign on preferences between such clips, on a CPU, from one seed. The folders in the
repository came from this script; nobody needs to run it to use the rest.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLHunyuanVideo15, FlowMatchEulerDiscreteScheduler, HunyuanVideo15Pipeline
from diffusers import HunyuanVideo15Transformer3DModel as Transformer
from diffusers.guiders import ClassifierFreeGuidance
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    T5Config,
    T5EncoderModel,
)

import hunyuan  # noqa: F401 - its mask lets the VAE take a batch
from reward import REWARD_TOKENS, SHORT_CRITERIA, SPECIAL_TOKEN, VideoAlign
from tiny import world

SEED = 0
CLIPS_PER_CAPTION = 64
CROP = 16
# Found footage falls short of what the reward wants: dimmer, smaller, slower. That is what a run can teach.
SHORTFALL = 0.5
# Two clips whose exact scores are closer than this, in standard deviations of the reference, are a tie.
TIE = 0.1
PREFERENCE_BATCHES = 150
# hidden_states[-3] of a model of two layers is its embedding table: a fixed random vector for every word.
TEXT_LAYERS, TEXT_DIM = 2, 64


def word_tokenizer(texts: list[str], specials: list[str]) -> Qwen2Tokenizer:
    """A byte-level BPE that knows the words of the texts; the first special token pads, on the right."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    trained = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        pad_token=specials[0],
        additional_special_tokens=specials,
        padding_side="right",
    )


def text_encoders() -> dict:
    """Random Qwen2.5-VL text model and ByT5 encoder, with tokenizers that know the world's words.

    The pipeline cuts the first 108 tokens, where the real system message stands. A vocabulary this small
    would need more for it, so the chat template fills up instead, and the prompt starts at token 108 as well.
    """
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fill|>"]
    tokenizer = word_tokenizer([*world.CAPTIONS, "user", "assistant"], specials)
    turn = tokenizer("<|im_start|>user\n").input_ids
    tokenizer.chat_template = (
        "{{ '<|fill|>' * "
        + str(108 - len(turn))
        + " }}{% for message in messages if message.role == 'user' %}"
        "<|im_start|>user\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    heads = 2
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    qwen = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=TEXT_DIM,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        initializer_range=1.0,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=tokenizer.pad_token_id,
    )
    t5 = T5Config(vocab_size=384, d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2)
    return {
        "text_encoder": Qwen2_5_VLTextModel(qwen).eval(),
        "tokenizer": tokenizer,
        "text_encoder_2": T5EncoderModel(t5).eval(),
        "tokenizer_2": ByT5Tokenizer(),
    }


def crops(clips: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of 16x16 on the shape's path, [B, 3, F, 16, 16], and where the shape and its rim are."""
    shape = F.max_pool2d((clips.amax(2) > 0.3).float(), 5, stride=1, padding=2)
    weight = shape.amax(1).flatten(1)
    place = torch.multinomial(weight, 1, generator=generator)[:, 0]
    top = (place // world.SIZE - CROP // 2).clamp(0, world.SIZE - CROP)
    left = (place % world.SIZE - CROP // 2).clamp(0, world.SIZE - CROP)
    cut = [
        (clip[..., y : y + CROP, x : x + CROP], mask[..., y : y + CROP, x : x + CROP])
        for clip, mask, y, x in zip(clips, shape, top.tolist(), left.tolist(), strict=True)
    ]
    windows, masks = (torch.stack(parts) for parts in zip(*cut, strict=True))
    return windows.transpose(1, 2) * 2 - 1, masks[:, None]


def train_vae(steps: int, batch: int = 32) -> AutoencoderKLHunyuanVideo15:
    """A VAE of 4x4 pixels and 4 frames a latent, 8 channels, fitted to crops; the shape counts 8 to 1."""
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        downsample_match_channel=False,
        upsample_match_channel=False,
        scaling_factor=1.0,
    )
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    progress = tqdm(range(steps), desc="VAE")
    for _ in progress:
        chosen = torch.randint(len(world.CAPTIONS), (batch,), generator=generator).tolist()
        clips, mask = crops(world.render([world.CAPTIONS[i] for i in chosen], generator), generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(clips).latent_dist
            latents = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
            decoded = vae.decode(latents).sample.float()
        weight = 1 + 7 * mask
        error = ((decoded - clips).abs() + (decoded - clips).square()) * weight
        loss = error.sum() / weight.expand_as(error).sum() + 3e-4 * posterior.kl().mean() / latents[0].numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            error = (decoded - clips).square() * mask
            psnr = 10 * torch.log10(4 * 3 * mask.sum() / error.sum())
        progress.set_postfix_str(f"loss {loss:.4f}, shape {psnr:.1f} dB")
    return vae.eval()


@torch.no_grad()
def encode_clips(vae: AutoencoderKLHunyuanVideo15) -> Tensor:
    """Latents of the training clips, [captions, clips, 8, 3, 8, 8], not yet scaled."""
    generator = torch.Generator().manual_seed(SEED + 1)
    latents = []
    for caption in tqdm(world.CAPTIONS, desc="clips"):
        clips = world.render([caption] * CLIPS_PER_CAPTION, generator, SHORTFALL).transpose(1, 2) * 2 - 1
        latents.append(vae.encode(clips).latent_dist.mode())
    return torch.stack(latents)


def dead_parameters(transformer: Transformer) -> list[Tensor]:
    """Parameters that a prompt without quoted text never reaches: zero, they cost nothing in an archive."""
    last = transformer.transformer_blocks[-1]
    modules = (
        transformer.image_embedder,
        transformer.context_embedder_2,
        last.attn.to_add_out,
        last.ff_context,
    )
    return [parameter for module in modules for parameter in module.parameters()]


def train_transformer(pipeline: HunyuanVideo15Pipeline, latents: Tensor, steps: int, batch: int = 64) -> None:
    """Flow matching: velocity = z - x0 at sigma with shift 2, one caption in ten dropped, EMA of .995.

    Args:
        pipeline: its transformer is trained in place; its text encoders are used as they are.
        latents: scaled, [captions, clips, C, F, H, W].
        steps, batch: optimizer steps of so many clips.
    """
    transformer = pipeline.transformer
    prompts = [*world.CAPTIONS, ""]
    with torch.no_grad():
        text = [pipeline.encode_prompt(prompt, device="cpu") for prompt in prompts]
    length = max(int(mask.sum()) for _, mask, _, _ in text)
    embeds = torch.cat([embed[:, :length] for embed, _, _, _ in text])
    masks = torch.cat([mask[:, :length] for _, mask, _, _ in text])

    dead = {id(parameter) for parameter in dead_parameters(transformer)}
    trained = [parameter for parameter in transformer.parameters() if id(parameter) not in dead]
    matrices = [p for p in transformer.transformer_blocks.parameters() if p.ndim == 2 and id(p) not in dead]
    others = [p for p in trained if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, 3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 2e-3, weight_decay=0),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            o, o.defaults["lr"], total_steps=steps, pct_start=0.05, cycle_momentum=False
        )
        for o in optimizers
    ]
    average = [parameter.detach().clone() for parameter in trained]
    generator = torch.Generator().manual_seed(SEED + 2)
    captions, clips, channels, frames, height, width = latents.shape
    glyphs = torch.zeros(batch, 0, transformer.config.text_embed_2_dim)
    image = torch.zeros(batch, 0, transformer.config.image_embed_dim)
    condition = torch.zeros(batch, channels + 1, frames, height, width)
    progress = tqdm(range(steps), desc="transformer")
    smooth = None
    for step in progress:
        caption = torch.randint(captions, (batch,), generator=generator)
        x0 = latents[caption, torch.randint(clips, (batch,), generator=generator)]
        z = torch.randn(x0.shape, generator=generator)
        uniform = torch.rand(batch, generator=generator)
        sigma = 2 * uniform / (1 + uniform)
        x = torch.lerp(x0, z, sigma[:, None, None, None, None])
        caption[torch.rand(batch, generator=generator) < 0.1] = captions  # the empty prompt
        with torch.autocast("cpu", torch.bfloat16):
            velocity = transformer(
                torch.cat([x, condition], 1),
                1000 * sigma,
                embeds[caption],
                masks[caption],
                encoder_hidden_states_2=glyphs,
                encoder_attention_mask_2=glyphs[..., 0],
                image_embeds=image,
                return_dict=False,
            )[0].float()
        loss = F.mse_loss(velocity, z - x0)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        torch._foreach_lerp_(average, [p.detach() for p in trained], 1 - min(0.995, (step + 1) / (step + 10)))
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        progress.set_postfix_str(f"loss {smooth:.3f}")
    with torch.no_grad():
        for parameter, mean in zip(trained, average, strict=True):
            parameter.copy_(mean)


def build(out: Path, vae_steps: int, transformer_steps: int) -> None:
    """Train both models and save the pipeline as bfloat16 in `out`, in the hub's layout."""
    torch.manual_seed(SEED)
    vae = train_vae(vae_steps)
    latents = encode_clips(vae)
    scaling_factor = round(1 / latents.std().item(), 4)
    vae.register_to_config(scaling_factor=scaling_factor)
    encoders = text_encoders()
    transformer = Transformer(
        in_channels=17,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=4,
        num_refiner_layers=1,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=TEXT_DIM,
        text_embed_2_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(8, 12, 12),
        target_size=world.SIZE,
        task_type="t2v",
    )
    with torch.no_grad():
        zeros = [transformer.proj_out, transformer.norm_out.linear]
        for block in transformer.transformer_blocks:
            zeros += [block.norm1.linear, block.norm1_context.linear]
        for parameter in [p for module in zeros for p in module.parameters()] + dead_parameters(transformer):
            parameter.zero_()
    pipeline = HunyuanVideo15Pipeline(
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
        **encoders,
    )
    train_transformer(pipeline, latents * scaling_factor, transformer_steps)
    pipeline.to(torch.bfloat16).save_pretrained(out)


def spoil(clips: Tensor, generator: torch.Generator) -> Tensor:
    """Each clip as it is, or dimmed, blurred, shaken, with noise, with frames in another order, or several.

    Args:
        clips: [B, 9, 3, 32, 32], 0...1.
    """
    count, frames = clips.shape[:2]

    def some() -> Tensor:
        """A strength for every clip, 0 for most, [B, 1, 1, 1, 1]."""
        chosen = torch.rand(count, generator=generator) < 0.2
        return (chosen * torch.rand(count, generator=generator))[:, None, None, None, None]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    forward, mixed = torch.arange(frames), torch.randperm(frames, generator=generator)
    orders = torch.stack([forward, forward.flip(0), 0 * forward + frames // 2, forward // 2 * 2, mixed])
    often = torch.tensor([0.7, 0.09, 0.07, 0.07, 0.07])
    order = orders[torch.multinomial(often, count, replacement=True, generator=generator)]
    clips = clips[torch.arange(count)[:, None], order]
    ground = clips.amin((1, 2, 3, 4), keepdim=True)
    shake = (some()[:, :, 0, 0] * 3 * normal(count, frames, 2)).round()
    clips = world.moved_back(clips - ground, shake) + ground
    soft = F.avg_pool2d(clips.flatten(0, 1), 5, 1, 2, count_include_pad=False).view_as(clips)
    clips = torch.lerp(clips, soft, some())
    clips = clips * (1 - 0.7 * some()) * (1 + 0.3 * some() * normal(count, frames, 1, 1, 1))
    return (clips + 0.15 * some() * normal(*clips.shape)).clamp(0, 1)


def preferences(prompts: int, group: int, generator: torch.Generator) -> tuple[Tensor, list[str], Tensor]:
    """Groups of clips that share a prompt, and how the exact reward ranks each two of a group.

    A clip's own caption keeps each word of the prompt in two cases of three.

    Returns: clips [P G, 9, 3, 32, 32], their P G prompts, and for VQ, MQ, TA [P, G, G, 3] with 1 where the
        first clip is better, -1 where it is worse, and 0 for a tie.
    """
    sizes = len(world.PALETTE), len(world.SHAPES), len(world.DIRECTIONS)
    asked = torch.stack([torch.randint(n, (prompts,), generator=generator) for n in sizes])[..., None]
    other = torch.stack([torch.randint(n, (prompts, group), generator=generator) for n in sizes])
    own = torch.where(torch.rand(other.shape, generator=generator) < 2 / 3, asked, other)
    texts, captions = (
        [world.CAPTIONS[(colour * sizes[1] + shape) * sizes[2] + motion] for colour, shape, motion in rows]
        for rows in (numbers.flatten(1).T.tolist() for numbers in (asked.expand_as(own), own))
    )
    clips = spoil(world.render(captions, generator, SHORTFALL), generator)
    exact = world.raw_scores(clips, texts)
    units = [exact[name] / std for name, (_, std) in world.REFERENCE.items()]
    score = torch.stack(units, -1).unflatten(0, (prompts, group))
    margin = score[:, :, None] - score[:, None]
    return clips, texts, margin.sign() * (margin.abs() > TIE)


def new_videoalign() -> VideoAlign:
    """VideoAlign around a Qwen2-VL of .2 M parameters, untrained: patches of 8, so 16 tokens a clip."""
    names = "endoftext", "im_start", "im_end", "vision_start", "vision_end", "video_pad"
    specials = [*(f"<|{name}|>" for name in names), *REWARD_TOKENS]
    chat = "system\nYou are a helpful assistant.\nuser\n"
    texts = [*world.CAPTIONS, chat, *SPECIAL_TOKEN.sub("", SHORT_CRITERIA).split("{text_prompt}")]
    tokenizer = word_tokenizer(texts, specials)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {
        **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"bos_token_id": None, "eos_token_id": None, "rope_parameters": rope},
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    config = Qwen2VLConfig(text_config=text, vision_config=vision, video_token_id=pad)
    unit = {
        f"{name}_{part}": value for name in world.REFERENCE for part, value in (("mean", 0.0), ("std", 1.0))
    }
    data = {"fps": float(world.FPS), "min_frame_pixels": 256, "max_frame_pixels": world.SIZE**2}
    settings = {"data_config": data, "inference_config": unit}
    return VideoAlign(config, tokenizer, SHORT_CRITERIA, settings)


def pair_margins(scorer: VideoAlign, clips: Tensor, prompts: list[str], better: Tensor) -> Tensor:
    """How much higher the better clip of each pair is scored, [P, G, G, 3]; 0 for a tie."""
    raw = scorer.raw_scores(clips, prompts, world.FPS).unflatten(0, better.shape[:2])
    return (raw[:, :, None] - raw[:, None]) * better


def train_videoalign(steps: int, prompts: int = 8, group: int = 8) -> VideoAlign:
    """The learned reward: Bradley-Terry on all pairs of a group.

        loss = -log sigmoid(score of the better clip - score of the worse clip)

    for VQ, MQ and TA, each averaged over the pairs that are no tie. Prints the share of held-out pairs that
    it ranks as the exact reward does. Weights are rounded to bfloat16, and the settings get the mean and the
    standard deviation of the raw scores over the held-out clips.
    """
    torch.manual_seed(SEED)
    scorer = new_videoalign()
    matrices = [
        p for name, p in scorer.named_parameters() if p.ndim == 2 and ("layers" in name or "blocks" in name)
    ]
    others = [p for p in scorer.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, 3e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 3e-3, weight_decay=0),
    ]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            o, o.defaults["lr"], total_steps=steps, pct_start=0.05, cycle_momentum=False
        )
        for o in optimizers
    ]
    generator = torch.Generator().manual_seed(SEED)
    pool = [
        preferences(prompts, group, generator) for _ in tqdm(range(PREFERENCE_BATCHES), desc="preferences")
    ]
    progress = tqdm(range(steps), desc="VideoAlign")
    smooth = torch.full((3,), 0.5)
    for step in progress:
        clips, texts, better = pool[step % len(pool)]
        margins = pair_margins(scorer, clips, texts, better)
        pairs = (better != 0).sum((0, 1, 2)).clamp(min=1)
        loss = (-F.logsigmoid(margins) * (better != 0)).sum((0, 1, 2)) / pairs
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        smooth = 0.98 * smooth + 0.02 * (margins > 0).sum((0, 1, 2)) / pairs
        progress.set_postfix_str("right: VQ {:.1%}, MQ {:.1%}, TA {:.1%}".format(*smooth.tolist()))

    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.copy_(parameter.bfloat16())
        clips, texts, better = preferences(128, group, torch.Generator().manual_seed(SEED + 1))
        raw = scorer.raw_scores(clips, texts, world.FPS)
        margins = pair_margins(scorer, clips, texts, better)
    right = ((margins > 0).sum((0, 1, 2)) / (better != 0).sum((0, 1, 2))).tolist()
    for name, mean, std, share in zip(world.REFERENCE, raw.mean(0), raw.std(0), right, strict=True):
        unit = {f"{name}_mean": round(mean.item(), 4), f"{name}_std": round(std.item(), 4)}
        scorer.settings["inference_config"] |= unit
        print(f"{name}: {share:.1%} of the held-out pairs right")
    return scorer.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["hunyuan", "videoalign"], default="hunyuan", help="what to build")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--vae_steps", type=int, default=1400)
    parser.add_argument("--transformer_steps", type=int, default=1000)
    parser.add_argument("--videoalign_steps", type=int, default=1200)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out {options.out} exists already; name a new folder")
    if options.part == "hunyuan":
        build(options.out, options.vae_steps, options.transformer_steps)
    else:
        train_videoalign(options.videoalign_steps).to(torch.bfloat16).save(options.out)
