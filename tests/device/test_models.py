"""Models of transformers in bfloat16: tilewise's results beside eager's, by the rule.

The oracle is eager in float32: in float64 its masks make rows of padding NaN.
"""

import copy

import pytest
import torch

from tilewise.testing import tolerance

transformers = pytest.importorskip("transformers")

from tilewise.integrations import transformers as integration  # noqa: E402

DEVICE = "cuda"
B, S, VOCAB, WINDOW = 2, 200, 64, 70
COMMON = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
}
TEXT = {
    **COMMON,
    "vocab_size": VOCAB,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DECODERS = {
    "Llama": {},
    "Gemma2": {
        "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64,
    },
    "GptOss": {
        "sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "Mistral": {"sliding_window": WINDOW},
}  # fmt: skip
OTHERS = {
    "Bert": {"vocab_size": VOCAB},
    "ViT": {"image_size": 64, "patch_size": 4},
    "Whisper": {
        "vocab_size": VOCAB, "num_mel_bins": 8, "d_model": 256, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_source_positions": S,
        "max_target_positions": S, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "init_std": 0.1,
    },
}  # fmt: skip


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)


ids = torch.randint(2, VOCAB, (B, S), generator=torch.Generator().manual_seed(1))
left_padded, right_padded = torch.ones_like(ids), torch.ones_like(ids)
left_padded[0, :70] = 0
right_padded[1, -90:] = 0
starts_again = torch.cat([torch.arange(n) for n in (70, 1, 129)])[None]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    integration.register()


def built(name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    kind = "ForCausalLM" if name in DECODERS else "Model"
    numbers = {**TEXT, **DECODERS[name]} if name in DECODERS else {**COMMON, **OTHERS[name]}
    config = getattr(transformers, f"{name}Config")(**numbers)
    model = getattr(transformers, f"{name}{kind}")._from_config(config, attn_implementation="eager")
    return model.eval().to(DEVICE, dtype)


def results(model, implementation, inputs, real):
    """Output over real tokens, and all gradients in one row."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    found = model(**inputs)
    out = found.logits if "logits" in found else found.last_hidden_state
    out = out if real is None else out[real.bool()]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    (out * weights).sum().backward()
    gradients = [p.grad.flatten().double() for p in model.parameters() if p.grad is not None]
    return out.detach(), torch.cat(gradients)


def assert_as_exact_as_eager(name, real=None, **inputs):
    model = built(name)
    inputs = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in inputs.items()}
    real = None if real is None else real.to(DEVICE)
    precise = {
        n: x.float() if torch.is_tensor(x) and x.is_floating_point() else x
        for n, x in inputs.items()
    }
    out, gradient = results(model, "tilewise", inputs, real)
    plain_out, plain_gradient = results(model, "eager", inputs, real)
    exact_out, exact_gradient = results(copy.deepcopy(model).float(), "eager", precise, real)
    error, allowed = tolerance.excess("out", out, exact_out, plain_out, torch.bfloat16)
    assert error <= allowed
    scale = torch.linalg.vector_norm(exact_gradient)
    errors = [torch.linalg.vector_norm(g - exact_gradient) for g in (gradient, plain_gradient)]
    eps = torch.finfo(torch.bfloat16).eps
    assert errors[0] <= tolerance.K_GRADIENT * errors[1] + 2 * eps * scale


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, padding):
    mask = {"none": None, "left": left_padded, "right": right_padded}[padding]
    assert_as_exact_as_eager(name, mask, input_ids=ids, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_rows(name):
    inputs = {"input_ids": ids[:1], "position_ids": starts_again, "use_cache": False}
    assert_as_exact_as_eager(name, **inputs)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_bert(padding):
    mask = {"none": None, "left": left_padded, "right": right_padded}[padding]
    assert_as_exact_as_eager("Bert", mask, input_ids=ids, attention_mask=mask)


def test_vit():
    assert_as_exact_as_eager("ViT", pixel_values=draw(B, 3, 64, 64).bfloat16())


def test_whisper():
    sound = draw(B, 8, 2 * S).bfloat16()
    assert_as_exact_as_eager("Whisper", input_features=sound, decoder_input_ids=ids[:, :77])


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate_gives_the_same_tokens(name, cache):
    """In float32, where no two logits are so near that rounding decides."""
    model, tokens = built(name, torch.float32), []
    inputs = {"input_ids": ids.to(DEVICE), "attention_mask": left_padded.to(DEVICE)}
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        tokens.append(
            model.generate(**inputs, max_new_tokens=12, do_sample=False, cache_implementation=cache)
        )
    assert torch.equal(*tokens)


def test_compiled():
    model = built("Llama")
    inputs = {"input_ids": ids.to(DEVICE), "use_cache": False}
    want = results(model, "tilewise", inputs, None)
    model.forward = torch.compile(model.forward, fullgraph=True)
    got = results(model, "tilewise", inputs, None)
    for a, b in zip(got, want, strict=True):
        gap = torch.linalg.vector_norm(a.double() - b.double())
        assert gap <= 0.05 * torch.linalg.vector_norm(b.double())
