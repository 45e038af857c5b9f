"""HunyuanVideo 1.5 as a policy: load, adapt, shard, encode, velocity, decode, export.

The models are those of diffusers, loaded from a folder or a hub id of the hub's layout; `tiny/hunyuan` has
that layout, so there is nothing in here about size. The sampling loop is the caller's: `velocity` is one
guided prediction.

Text is kept without padding. The stock pipeline pads it to 1,985 tokens and masks a dense square of the whole
sequence in every block; all samples of a micro-batch are of one prompt here, so their tokens are all valid
and no mask is needed. The function is the same, and the fast attention kernels apply.

Shapes: B videos; latents [B, C, F, H, W], float32; pixels [B, F, C, H, W] in 0...1. Sign: velocity = z - x0.
"""

import gc
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Pipeline, HunyuanVideo15Transformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15AttnBlock
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.utils import logging
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import cast_adapter_dtype
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging as transformers_logging

# Of the transformer's output, which is a view; nothing here is changed in place.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")

ADAPTER = "policy"
# Attention and MLP of both streams; a bare "to_q" would match the text refiner's too.
LORA_TARGETS = re.compile(
    r"transformer_blocks\.\d+\."
    r"(attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)|ff(_context)?\.net\.(0\.proj|2))"
)
LORA_FILE = "pytorch_lora_weights.safetensors"
EMPTY_PROMPT = ""


@dataclass(frozen=True)
class Text:
    """Valid tokens of one prompt, on the CPU: those of thousands would fill a GPU."""

    words: Tensor  # [1, L, D] of Qwen2.5-VL
    glyphs: Tensor  # [1, L2, D2] of ByT5, for what the prompt puts in quotes; L2 is 0 without


class Rotary:
    """Cosines and sines of the positions, in a class that FSDP does not look into for tensors to cast.

    They stay float32, as in the stock model, and one copy serves all blocks, checkpointed ones too.
    """

    def __init__(self, pair: tuple[Tensor, Tensor]):
        self.pair = pair

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.pair)


class UnmaskedAttention:
    """Joint attention of image and text tokens that are all valid: the stock processor without its mask."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Iterable[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        def heads(projection: nn.Module, states: Tensor) -> Tensor:
            return projection(states).unflatten(2, (attn.heads, -1))

        image_query = attn.norm_q(heads(attn.to_q, hidden_states))
        image_key = attn.norm_k(heads(attn.to_k, hidden_states))
        text_query = attn.norm_added_q(heads(attn.add_q_proj, encoder_hidden_states))
        text_key = attn.norm_added_k(heads(attn.add_k_proj, encoder_hidden_states))
        image_query, image_key = (
            apply_rotary_emb(states, image_rotary_emb, sequence_dim=1) for states in (image_query, image_key)
        )
        values = heads(attn.to_v, hidden_states), heads(attn.add_v_proj, encoder_hidden_states)
        joint = dispatch_attention_fn(
            torch.cat([image_query, text_query], 1),
            torch.cat([image_key, text_key], 1),
            torch.cat(values, 1),
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        joint = joint.flatten(2, 3).to(image_query.dtype)
        image, text = joint.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text)


def causal_mask(n_frame: int, n_hw: int, dtype, device, batch_size: int | None = None) -> Tensor:
    """The VAE's mask of its attention: a frame sees itself and those before it, [S, S].

    The stock function fills it row by row in a Python loop, and gives it a batch axis where attention wants
    the heads, so that a batch of videos fails.
    """
    frame = torch.arange(n_frame * n_hw, device=device) // n_hw
    hidden = frame[:, None] < frame
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)


HunyuanVideo15AttnBlock.prepare_causal_attention_mask = staticmethod(causal_mask)


class Policy:
    """A HunyuanVideo 1.5 whose velocity is trained, with what stands around it.

    Args:
        pipeline: loaded by `load_pipeline`.
        device: where the transformer and the VAE live.
        guidance: scale of classifier-free guidance; 1 predicts once, anything else twice.
        attention: backend of the blocks, one of diffusers' that has a backward; "native" is torch's, which
            takes the fastest kernel of the device.

    Attributes:
        passes: through the transformer so far, a micro-batch each.

    Raises: ValueError for a backend that there is not, or not here.
    """

    def __init__(
        self,
        pipeline: HunyuanVideo15Pipeline,
        device: torch.device,
        guidance: float = 1.0,
        attention: str = "native",
    ):
        self.pipeline, self.device, self.guidance = pipeline, device, guidance
        self.passes = 0
        self.transformer = pipeline.transformer.eval()  # there is no dropout; eval says so
        self.vae = pipeline.vae.eval().requires_grad_(False).to(device)
        self.vae.enable_tiling()
        self.shift = pipeline.scheduler.config.shift
        self.texts: dict[str, Text] = {}
        self.parameters: list[Tensor] = []
        for block in self.transformer.transformer_blocks:
            block.attn.set_processor(UnmaskedAttention())
        self.transformer.rope.register_forward_hook(lambda module, inputs, output: Rotary(output))
        if attention != "native":
            self._set_attention(attention)

    def _set_attention(self, backend: str) -> None:
        try:
            self.transformer.set_attention_backend(backend)  # checks it, and fetches its kernel
        except (ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"--attention {backend}: {error}") from error

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(C, F, H, W) of the latents of a video.

        Raises: ValueError for a size that the VAE or the patches cannot divide.
        """
        temporal = self.vae.config.temporal_compression_ratio
        patch = self.transformer.config.patch_size
        spatial = self.vae.config.spatial_compression_ratio
        if frames < 1 or (frames - 1) % temporal:
            raise ValueError(f"frames must be {temporal} n + 1, got {frames}")
        if height < 1 or width < 1 or height % (spatial * patch) or width % (spatial * patch):
            raise ValueError(
                f"height and width must be multiples of {spatial * patch}, got {height} x {width}"
            )
        channels = self.vae.config.latent_channels
        return channels, (frames - 1) // temporal + 1, height // spatial, width // spatial

    @torch.no_grad()
    def encode(self, prompts: Iterable[str]) -> None:
        """Encodes the prompts, and the empty one where guidance needs it, then lets the text encoders go.

        14.6 GB of encoders are needed once for a run's prompts, so give them all at once.

        Raises: ValueError for a prompt that is new after the encoders went.
        """
        wanted = [*prompts, EMPTY_PROMPT] if self.guidance != 1 else [*prompts]
        new = [prompt for prompt in dict.fromkeys(wanted) if prompt not in self.texts]
        if not new:
            return
        if self.pipeline.text_encoder is None:
            raise ValueError(f"the text encoders are gone; encode {new[0]!r} with the first prompts")
        encoders = self.pipeline.text_encoder, self.pipeline.text_encoder_2
        for encoder in encoders:
            encoder.to(self.device)
        for prompt in new:
            words, word_mask, glyphs, glyph_mask = self.pipeline.encode_prompt(prompt, device=self.device)
            words, glyphs = words[:, word_mask[0].bool()], glyphs[:, glyph_mask[0].bool()]
            self.texts[prompt] = Text(words.float().cpu(), glyphs.float().cpu())
        self.pipeline.text_encoder = self.pipeline.text_encoder_2 = None
        del encoder, encoders
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def velocity(self, x: Tensor, sigma: Tensor | float, prompt: str) -> Tensor:
        """Guided velocity of a micro-batch of one prompt.

            velocity = empty + guidance (prompted - empty)

        Both predictions run by themselves, since their texts have other lengths.

        Args:
            x: latents at sigma, [B, C, F, H, W], float32.
            sigma: noise level, 0-dim; the transformer is given 1000 sigma in float32, since bfloat16 would
                round 978.26 to 980.
            prompt: one that was encoded.

        Returns: [B, C, F, H, W], float32.
        """
        velocity = self._predict(x, sigma, self.texts[prompt])
        if self.guidance != 1:
            empty = self._predict(x, sigma, self.texts[EMPTY_PROMPT])
            velocity = empty + self.guidance * (velocity - empty)
        return velocity

    def _predict(self, x: Tensor, sigma: Tensor | float, text: Text) -> Tensor:
        self.passes += 1
        batch, channels, *size = x.shape
        words, glyphs = (each.to(x.device).expand(batch, -1, -1) for each in (text.words, text.glyphs))
        condition = x.new_zeros(
            batch, channels + 1, *size
        )  # of image-to-video: a latent and a mask, none here
        return self.transformer(
            torch.cat([x, condition], 1),
            torch.full((batch,), 1000 * float(sigma), dtype=torch.float32, device=x.device),
            words,
            torch.ones(words.shape[:2], device=x.device),
            encoder_hidden_states_2=glyphs,
            encoder_attention_mask_2=torch.ones(glyphs.shape[:2], device=x.device),
            image_embeds=x.new_zeros(batch, 0, self.transformer.config.image_embed_dim),
            return_dict=False,
        )[0].float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels of latents, scaled once.

        Args:
            latents: [B, C, F, H, W].

        Returns: [B, F, C, H, W], float32, 0...1, on the latents' device.
        """
        # Videos of several tiles one by one, which is what fits; small ones together, which is faster.
        self.vae.use_slicing = max(latents.shape[-2:]) > self.vae.tile_latent_min_height
        latents = latents.to(self.vae.dtype) / self.vae.config.scaling_factor
        video = self.vae.decode(latents, return_dict=False)[0].float()
        return (video / 2 + 0.5).clamp(0, 1).transpose(1, 2)

    def adapt(self, adaptation: str, rank: int = 16, alpha: int = 64) -> None:
        """Chooses what is trained: "lora" on the attention and the MLPs of the blocks, or "full".

        What never gets a gradient in text-to-video (the image embedder, the glyph projection, the text
        outputs of the last block) is frozen either way: an optimizer without a state for it cannot be
        resumed.

        Args:
            rank, alpha: of the LoRA, scaled by alpha / rank: 4 moved HunyuanVideo for others, 1 did not.
        """
        self.transformer.requires_grad_(False)
        dead = {id(parameter) for parameter in self._dead_parameters()}
        if adaptation == "lora":
            targets = [
                name
                for name, module in self.transformer.named_modules()
                if LORA_TARGETS.fullmatch(name) and id(module.weight) not in dead
            ]
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
            self.transformer.add_adapter(config, adapter_name=ADAPTER)
            cast_adapter_dtype(self.transformer, adapter_name=ADAPTER)  # float32, whatever the base is
        else:
            for parameter in self.transformer.parameters():
                parameter.requires_grad_(id(parameter) not in dead)

    def _dead_parameters(self) -> Iterator[nn.Parameter]:
        last = self.transformer.transformer_blocks[-1]
        embedders = self.transformer.image_embedder, self.transformer.context_embedder_2
        for module in (*embedders, last.attn.to_add_out, last.ff_context):
            yield from module.parameters()

    def shard(self, compute_dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> None:
        """Moves the transformer to the device and shards it over the ranks with FSDP2, block by block.

        One block at a time, so that no device ever holds the whole model. Only the blocks compute in
        `compute_dtype`: embedders, timestep and output stay float32. In bfloat16 the tiny model's velocity is
        then within 1 % of float32's, and a LoRA's gradient within 2 %. Lists `parameters`, as FSDP wants it,
        right after sharding.
        """
        blocks = self.transformer.transformer_blocks
        sharded = dist.get_world_size() > 1 or compute_dtype != torch.float32  # else FSDP has nothing to do
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),)) if sharded else None
        for block in blocks:
            block.to(self.device)
            if checkpointing:  # within FSDP's hooks, whose cast of the inputs is then not recomputed
                recompute = {"use_reentrant": False, "preserve_rng_state": False}  # there is no dropout
                block.forward = partial(checkpoint, block.forward, **recompute)
            if sharded:  # the next block would cast the output back
                output = torch.float32 if block is blocks[-1] else None
                precision = MixedPrecisionPolicy(compute_dtype, torch.float32, output_dtype=output)
                fully_shard(block, mesh=mesh, mp_policy=precision)
        for module in self.transformer.children():
            if module is not blocks:
                module.to(self.device, torch.float32)
        if sharded:
            fully_shard(self.transformer, mesh=mesh)
        self.parameters = [each for each in self.transformer.parameters() if each.requires_grad]

    def reshard(self) -> None:
        """Drops gathered parameters, so that a change of the shards is seen."""
        for module in self.transformer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @contextmanager
    def at(self, anchor) -> Iterator[None]:
        """The policy is another one of its own past inside: a `trust_region.Anchor` of its parameters."""
        self.reshard()
        with anchor.swapped_in():
            yield
            self.reshard()

    def load_lora(self, folder: str | Path) -> None:
        """Adds a saved LoRA, frozen, to the transformer. Before `shard`.

        Raises: ValueError if the file is missing or not of this transformer: diffusers would only warn.
        """
        file = existing(folder, LORA_FILE)
        modules = dict(self.transformer.named_modules())
        with safe_open(file, "pt") as saved:
            unknown = [key for key in saved.keys() if key.partition(".lora_")[0] not in modules]  # noqa: SIM118
        if unknown:
            raise ValueError(f"{file} is of another model: this one has nothing for {unknown[0]}")
        self.transformer.load_lora_adapter(
            file.parent, weight_name=LORA_FILE, prefix=None, adapter_name="loaded"
        )
        self.transformer.requires_grad_(False)

    def load_transformer(self, folder: str | Path) -> None:
        """Replaces the transformer by a fine-tuned one of the same configuration. Before `shard`.

        Raises: ValueError if the folder has none.
        """
        existing(folder, "config.json")
        tuned = HunyuanVideo15Transformer3DModel.from_pretrained(folder, dtype=self.transformer.dtype)
        self.transformer.load_state_dict(tuned.state_dict())

    def export(self, folder: Path, is_main: bool) -> None:
        """Writes what was trained, gathered from all ranks, as diffusers reads it. Call it on every rank.

        A LoRA goes to `pytorch_lora_weights.safetensors`, with its rank and alpha; a full fine-tune becomes a
        folder for `from_pretrained`.
        """
        config = getattr(self.transformer, "peft_config", {}).get(ADAPTER)
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=config is not None
        )
        state = get_model_state_dict(self.transformer, options=options)
        if not is_main:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            state = get_peft_model_state_dict(self.transformer, state_dict=state, adapter_name=ADAPTER)
            described = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
            metadata = {"format": "pt", "lora_adapter_metadata": json.dumps(described)}
            save_file({k: v.contiguous() for k, v in state.items()}, folder / LORA_FILE, metadata)
            return
        with torch.device("meta"):
            whole = HunyuanVideo15Transformer3DModel.from_config(self.transformer.config)
        whole.load_state_dict(state, assign=True)
        whole.save_pretrained(folder)


def existing(folder: str | Path, file: str) -> Path:
    """A file of a result's folder; ValueError if it is not there."""
    path = Path(folder) / file
    if not path.is_file():
        raise ValueError(f"{folder} has no {file}")
    return path


def load_pipeline(
    model: str, dtype: torch.dtype = torch.float32, masters: bool = True
) -> HunyuanVideo15Pipeline:
    """The pipeline of a folder or a hub id, on the CPU.

    Args:
        dtype: of the text encoders, the VAE and, without masters, the transformer.
        masters: keep the transformer's weights in float32 whatever it computes in, as a full fine-tune must;
            a LoRA is float32 by itself.

    Raises: ValueError for a path that is no such folder, or an id that cannot be loaded.
    """
    if Path(model).exists() and not (Path(model) / "model_index.json").is_file():
        raise ValueError(f"{model} has no model_index.json, the hub's HunyuanVideo 1.5 has one")
    logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    logging.get_logger("diffusers.guiders.guider_utils").setLevel(logging.ERROR)  # "guiders are experimental"
    dtypes = {"transformer": torch.float32 if masters else dtype, "default": dtype}
    try:
        return HunyuanVideo15Pipeline.from_pretrained(model, dtype=dtypes)
    except OSError as error:
        raise ValueError(f"{model} is neither a folder nor a model on the hub that can be reached") from error
