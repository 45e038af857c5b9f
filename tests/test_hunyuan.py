"""The policy is the stock pipeline's own model, without its padding; what it writes, diffusers reads."""

import pytest
import torch
from conftest import MODEL, PROMPTS, load_copy
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

import hunyuan
from evaluate import Setting, ode_latents
from processes import seeded_generator

SHAPE = (8, 3, 8, 8)
STEPS = 4


def stir(policy, amount=0.05):
    """Trained-looking weights: a fresh LoRA adds nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += amount * torch.randn(parameter.shape, generator=generator)


def stock_output(pipeline, prompt, guidance, latents, output_type="latent"):
    pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": STEPS}
    return pipeline(prompt, latents=latents, output_type=output_type, **size).frames


def noise_of(prompt):
    return torch.randn(SHAPE, generator=seeded_generator("evaluation", prompt, 0))[None]


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_ode_is_the_stock_pipeline(make_policy, prompt, guidance):
    """Unpadded, unmasked, guided in two passes: the latents and the pixels of diffusers' own sampler."""
    policy = make_policy(guidance)
    ours = ode_latents(policy, prompt, [0], Setting(STEPS, policy.shift, SHAPE, 8, 4))
    pipeline = hunyuan.load_pipeline(MODEL)
    pipeline.vae.enable_slicing()
    theirs = stock_output(pipeline, prompt, guidance, noise_of(prompt))
    assert torch.allclose(ours, theirs, atol=2e-5)
    pixels = stock_output(pipeline, prompt, guidance, noise_of(prompt), "pt")
    assert torch.allclose(policy.decode(ours), pixels, atol=2e-5)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_gradients_equal_the_padded_ones(make_policy, prompt):
    """Padding and its mask change neither the velocity nor the gradient of a weight."""
    policy = make_policy(adaptation="full")
    x, target = torch.randn(2, *SHAPE), torch.randn(2, *SHAPE)
    velocity = policy.velocity(x, 0.7, prompt)
    (velocity - target).square().mean().backward()
    ours = {n: p.grad for n, p in policy.transformer.named_parameters() if p.grad is not None}

    pipeline = hunyuan.load_pipeline(MODEL)
    with torch.no_grad():
        words, word_mask, glyphs, glyph_mask = pipeline.encode_prompt(prompt, device="cpu")
    padded = pipeline.transformer(
        torch.cat([x, torch.zeros(2, 9, *SHAPE[1:])], 1),
        torch.full((2,), 700.0),
        words.repeat(2, 1, 1),
        word_mask.repeat(2, 1),
        encoder_hidden_states_2=glyphs.repeat(2, 1, 1),
        encoder_attention_mask_2=glyph_mask.repeat(2, 1),
        image_embeds=torch.zeros(2, 729, 16),
        return_dict=False,
    )[0]
    (padded - target).square().mean().backward()
    assert torch.allclose(velocity, padded, atol=2e-5)
    theirs = dict(pipeline.transformer.named_parameters())
    assert len(ours) > 100
    errors = torch.stack([(gradient - theirs[name].grad).norm() for name, gradient in ours.items()])
    assert errors.norm() < 1e-5 * torch.stack([gradient.norm() for gradient in ours.values()]).norm()


@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_everything_that_is_trained_gets_a_gradient(make_policy, adaptation):
    """What never gets one is frozen: an optimizer without a state for it cannot be resumed."""
    policy = make_policy(adaptation=adaptation, prompts=PROMPTS[:1])
    policy.velocity(torch.randn(1, *SHAPE), 0.5, PROMPTS[0]).square().sum().backward()
    missing = [p.shape for p in policy.parameters if p.grad is None]
    assert policy.parameters and not missing


def test_the_timestep_is_float32(make_policy):
    """978.26 would be 980 in bfloat16."""
    policy, seen = make_policy(), []
    policy.transformer.time_embed.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    policy.velocity(torch.randn(1, *SHAPE), torch.tensor(0.97826, dtype=torch.float64), PROMPTS[0])
    assert seen[0].dtype == torch.float32 and abs(seen[0].item() - 978.26) < 1e-3


def test_a_lora_loads_into_the_stock_transformer(make_policy, tmp_path):
    """And something is loaded: diffusers only warns where nothing fits."""
    policy = make_policy()
    stir(policy)
    policy.export(tmp_path, is_main=True)
    transformer = hunyuan.load_pipeline(MODEL).transformer
    untrained = policy_output(transformer)
    transformer.load_lora_adapter(tmp_path, weight_name=hunyuan.LORA_FILE, prefix=None)
    assert transformer.peft_config
    assert (policy_output(transformer) - untrained).abs().max() > 1e-2
    assert torch.allclose(policy_output(transformer), policy_output(policy.transformer), atol=2e-5)

    reloaded = hunyuan.Policy(hunyuan.load_pipeline(MODEL), torch.device("cpu"))
    reloaded.load_lora(tmp_path)
    reloaded.shard()
    assert not reloaded.parameters
    assert torch.allclose(policy_output(reloaded.transformer), policy_output(transformer), atol=2e-5)


def policy_output(transformer):
    """A transformer's answer to fixed inputs."""
    generator = torch.Generator().manual_seed(2)
    words = torch.randn(1, 5, 64, generator=generator)
    with torch.no_grad():
        return transformer(
            torch.randn(1, 17, 3, 8, 8, generator=generator),
            torch.tensor([500.0]),
            words,
            torch.ones(1, 5),
            encoder_hidden_states_2=torch.zeros(1, 0, 32),
            encoder_attention_mask_2=torch.zeros(1, 0),
            image_embeds=torch.zeros(1, 0, 16),
            return_dict=False,
        )[0]


@pytest.mark.parametrize("adaptation", ["lora", "full"])
def test_the_stock_pipeline_samples_what_was_trained(make_policy, tmp_path, adaptation):
    policy = make_policy(adaptation=adaptation)
    stir(policy, 0.02)
    policy.export(tmp_path, is_main=True)
    pipeline = hunyuan.load_pipeline(MODEL)
    untrained = stock_output(pipeline, PROMPTS[0], 1.0, noise_of(PROMPTS[0]))
    if adaptation == "lora":
        pipeline.transformer.load_lora_adapter(tmp_path, weight_name=hunyuan.LORA_FILE, prefix=None)
    else:
        pipeline.transformer = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path)
    trained = stock_output(pipeline, PROMPTS[0], 1.0, noise_of(PROMPTS[0]))
    ours = ode_latents(policy, PROMPTS[0], [0], Setting(STEPS, policy.shift, SHAPE, 8, 4))
    assert (trained - untrained).abs().max() > 0.1
    assert torch.allclose(ours, trained, atol=1e-4)


def test_blocks_hand_on_what_they_compute_in(world, make_policy):
    """In bfloat16 a checkpointed input is half as large; the output layers get float32; little is lost."""
    policy = hunyuan.Policy(load_copy(MODEL, torch.bfloat16, masters=False), world.device)
    policy.encode(PROMPTS[:1])
    policy.adapt("lora")
    policy.shard(torch.bfloat16)
    seen, rotary = [], []
    for block in policy.transformer.transformer_blocks:
        block.register_forward_hook(lambda *call: seen.append(call[2][0].dtype))
        block.attn.register_forward_pre_hook(
            lambda *call: rotary.append(next(iter(call[2]["image_rotary_emb"]))), with_kwargs=True
        )
    x, exact = torch.randn(1, *SHAPE), make_policy()
    velocity = policy.velocity(x, 0.5, PROMPTS[0])
    assert rotary[0].dtype == torch.float32 and all(each is rotary[0] for each in rotary)
    assert seen == [torch.bfloat16] * (len(seen) - 1) + [torch.float32] and velocity.dtype == torch.float32
    assert (velocity - (whole := exact.velocity(x, 0.5, PROMPTS[0]))).norm() < 0.01 * whole.norm()


def test_a_lora_of_another_model_is_refused(make_policy, tmp_path):
    from safetensors.torch import save_file

    policy = hunyuan.Policy(hunyuan.load_pipeline(MODEL), torch.device("cpu"))
    with pytest.raises(ValueError, match=hunyuan.LORA_FILE):
        policy.load_lora(tmp_path)
    save_file({"blocks.7.lora_A.weight": torch.zeros(4, 4)}, tmp_path / hunyuan.LORA_FILE)
    with pytest.raises(ValueError, match="another model: this one has nothing for blocks"):
        policy.load_lora(tmp_path)


def test_a_full_fine_tune_loads_from_its_folder(make_policy, tmp_path):
    policy = make_policy(adaptation="full")
    stir(policy)
    policy.export(tmp_path / "transformer", is_main=True)
    loaded = HunyuanVideo15Transformer3DModel.from_pretrained(tmp_path / "transformer")
    assert torch.equal(policy_output(loaded), policy_output(loaded))
    assert torch.allclose(policy_output(loaded), policy_output(policy.transformer), atol=2e-5)


def test_decoding_is_scaled_once_and_by_sample(make_policy):
    """Pixels come back through the VAE, whatever the batch."""
    from tiny.world import CAPTIONS, render

    policy = make_policy()
    clips = render([CAPTIONS[0], CAPTIONS[21]], torch.Generator().manual_seed(0))
    vae = AutoencoderKLHunyuanVideo15.from_pretrained(f"{MODEL}/vae")
    vae.enable_slicing()
    with torch.no_grad():
        latents = vae.encode(clips.transpose(1, 2) * 2 - 1).latent_dist.mode() * vae.config.scaling_factor
    decoded = policy.decode(latents)
    assert decoded.shape == clips.shape
    assert (decoded - clips).square().mean() < 2e-3
    assert torch.allclose(policy.decode(latents[1:]), decoded[1:], atol=1e-6)
    with torch.no_grad():
        pixels = vae.decode(latents / vae.config.scaling_factor).sample.transpose(1, 2)
    assert torch.allclose(decoded, (pixels / 2 + 0.5).clamp(0, 1), atol=1e-5)
    assert vae.config.scaling_factor != 1


def test_text_encoders_go_once_they_are_done(make_policy):
    policy = make_policy(guidance=2.0)
    assert set(policy.texts) == {*PROMPTS, ""}
    assert policy.texts[PROMPTS[0]].glyphs.shape[1] == 0 < policy.texts[PROMPTS[1]].glyphs.shape[1]
    policy.encode(PROMPTS)
    with pytest.raises(ValueError, match="a new prompt"):
        policy.encode(["a new prompt"])


@pytest.mark.parametrize("size", [(8, 32, 32), (9, 30, 32), (9, 32, 0), (0, 32, 32)])
def test_sizes_that_the_model_cannot_have(make_policy, size):
    with pytest.raises(ValueError, match=str(size[0] if size[0] != 9 else size[2])):
        make_policy().latent_shape(*size)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="no model_index"):
        hunyuan.load_pipeline(str(tmp_path))
    with pytest.raises(ValueError, match="neither a folder nor a model"):
        hunyuan.load_pipeline("nobody/nothing")
