"""attn_implementation="tilewise": tiny random models give eager's logits, gradients and tokens."""

import copy
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise

transformers = pytest.importorskip("transformers")

from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.masks import Band, PatternMask  # noqa: E402

B, S, VOCAB = 2, 20, 64
TOL = 1e-5  # a window or a mask wrong by one shows as 1e-2 and more
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # scores that differ, so that a wrong mask shows
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 6
DECODERS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL,
        sliding_window=WINDOW,
        num_local_experts=2,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
}
ids = torch.randint(2, VOCAB, (B, S), generator=torch.Generator().manual_seed(1))
left_padded, right_padded = torch.ones_like(ids), torch.ones_like(ids)
left_padded[0, :5] = 0
right_padded[1, -7:] = 0
LENGTHS = (3, 9, 8)  # of documents in a row of 20
starts_again = torch.cat([torch.arange(n) for n in LENGTHS])[None]
boundaries = torch.tensor([0, 3, 12, 20], dtype=torch.int32)


@pytest.fixture(autouse=True, scope="module")
def _registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        integration.register()
        yield


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request):
    torch.manual_seed(0)
    config = DECODERS[request.param]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def run(model, implementation, backward=True, real=None, call=None, **inputs):
    """Output (over real tokens) and the gradients of every parameter, with an implementation."""
    model.set_attn_implementation(implementation)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        found = (model if call is None else call)(**inputs)
        out = found.logits if "logits" in found else found.last_hidden_state
        out = out if real is None else out[real.bool()]
    if not backward:
        return [out]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_close(got, want):
    """Outputs by their own size, gradients by that of the largest: some are zero by rounding."""
    assert len(got) == len(want)
    size = [float(x.abs().max()) for x in want]
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert float((a - b).abs().max()) <= TOL * (size[0] if i == 0 else max(size[1:]))


def assert_equals_eager(model, **inputs):
    got, want = (run(model, name, **inputs) for name in ("tilewise", "eager"))
    assert_close(got, want)
    return got


def separate(model, inputs=ids[:1], **further):
    """Eager's results for each document by itself, one after the other."""
    parts = inputs.split(LENGTHS, dim=1)
    return torch.cat(
        [run(model, "eager", backward=False, input_ids=x, **further)[0] for x in parts], 1
    )


def additive(seen):
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def causal(seqlen=S):
    return torch.ones(seqlen, seqlen, dtype=torch.bool).tril()


# Decoders


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_decoder(decoder, padding):
    mask = {"none": None, "left": left_padded, "right": right_padded}[padding]
    assert_equals_eager(decoder, input_ids=ids, attention_mask=mask, real=mask)


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens", "both", "cache"])
def test_packed_rows_are_documents_by_themselves(decoder, told_by):
    # not compared to eager, which mixes documents with a cache, and in GPT-OSS always
    inputs = {"input_ids": ids[:1], "position_ids": starts_again, "use_cache": told_by == "cache"}
    if told_by in ("cu_seq_lens", "both"):
        inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone()}
        inputs |= {"max_length_q": 9, "max_length_k": 9}
    if told_by == "cu_seq_lens":  # position embeddings are relative, so that boundaries will do
        del inputs["position_ids"]
    got = run(decoder, "tilewise", backward=False, **inputs)
    assert_close(got, [separate(decoder)])


def test_packed_gradients(decoder):
    got = run(decoder, "tilewise", input_ids=ids[:1], position_ids=starts_again, use_cache=False)
    block = torch.block_diag(*(causal(n) for n in LENGTHS)).bool()
    near = block & ~causal().tril(-WINDOW)
    layers = {"full_attention": block[None, None], "sliding_attention": near[None, None]}
    if decoder.config.model_type in ("gemma2", "gpt_oss"):
        mask = {name: additive(seen) for name, seen in layers.items()}
    else:
        one = "full_attention" if decoder.config.model_type == "llama" else "sliding_attention"
        mask = additive(layers[one])
    inputs = {"input_ids": ids[:1], "position_ids": starts_again, "attention_mask": mask}
    assert_close(got, run(decoder, "eager", **inputs))


def test_batch_of_packed_rows(decoder):
    """C13: documents never span rows, and a row's ids need not start at 0."""
    other = torch.cat([torch.arange(8), torch.arange(12)])[None]
    inputs = {
        "input_ids": ids,
        "position_ids": torch.cat([starts_again, other]),
        "use_cache": False,
    }
    got = run(decoder, "tilewise", backward=False, **inputs)[0]
    assert_close([got[:1]], [separate(decoder)])
    alone = {"input_ids": ids[1:, 8:], "attention_mask": torch.ones(1, 12)}
    assert_close([got[1:, 8:]], run(decoder, "eager", backward=False, **alone))
    late = {"input_ids": ids, "position_ids": torch.arange(7, 7 + S)[None]}
    assert_equals_eager(decoder, **late)


def test_a_mask_that_is_given_is_the_whole_truth(decoder):
    """With an attention_mask of ones, position_ids tell no documents: eager's meaning."""
    inputs = {"input_ids": ids[:1], "position_ids": starts_again, "use_cache": False}
    assert_equals_eager(decoder, attention_mask=torch.ones_like(ids[:1]), **inputs)


@pytest.mark.parametrize(
    "name",
    [
        "Llama4TextConfig",  # chunks
        "Gemma3TextConfig",
        "PhimoeConfig",  # windows that only the mask tells
        "DogeConfig",
        "ModernBertDecoderConfig",
        "DeepseekV3Config",  # values of another width
        "GPT2Config",
        "OPTConfig",
    ],
)
def test_other_decoders(name):
    torch.manual_seed(0)
    further = {
        "sliding_window": WINDOW, "attention_chunk_size": 8, "num_local_experts": 2,
        "num_experts_per_tok": 2, "n_embd": 32, "n_head": 4, "n_layer": 2, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    }  # fmt: skip
    if name == "DeepseekV3Config":
        further["num_key_value_heads"] = 4
    config = getattr(transformers, name)(**{**SMALL, **further})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for mask in (None, left_padded):
        assert_equals_eager(model.eval(), input_ids=ids, attention_mask=mask, real=mask)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_four_dimensions(decoder, kind):
    seen = causal()[None, None].repeat(B, 1, 1, 1)
    seen[0, :, :, 2] = False  # a key that only itself may see
    seen[:, :, 2, 2] = True
    seen[1, :, 4, 9] = True  # and one ahead
    added = additive(seen)
    if kind == "additive":
        added = added + torch.randn(seen.shape)
    ours = seen if kind == "bool" else added
    got = run(decoder, "tilewise", input_ids=ids, attention_mask=ours)
    assert_close(got, run(decoder, "eager", input_ids=ids, attention_mask=added))


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_gives_the_same_tokens(decoder, cache, padded):
    mask = left_padded if padded else torch.ones_like(ids)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    tokens = []
    for name in ("eager", "tilewise"):
        decoder.set_attn_implementation(name)
        found = decoder.generate(ids, attention_mask=mask, disable_compile=True, **options)
        tokens.append(found)
    assert tokens[0].shape == (B, S + 12)
    assert torch.equal(*tokens)


@pytest.mark.parametrize(
    "further", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 2}, {"use_cache": False}], ids=str
)
def test_other_ways_to_generate(decoder, further):
    tokens = []
    for name in ("eager", "tilewise"):
        decoder.set_attn_implementation(name)
        options = {"max_new_tokens": 8, "do_sample": False, **further}
        mask = torch.ones_like(ids[1:])
        tokens.append(decoder.generate(ids[1:], attention_mask=mask, **options))
    assert torch.equal(*tokens)


def test_steps_with_a_cache_continue(decoder):
    """Several new tokens after a prefix with padding: the diagonal ends bottom right."""
    results = []
    for name in ("eager", "tilewise"):
        decoder.set_attn_implementation(name)
        with torch.no_grad():
            first = decoder(ids[:, :13], attention_mask=left_padded[:, :13], use_cache=True)
            rest = decoder(
                ids[:, 13:], attention_mask=left_padded, past_key_values=first.past_key_values
            )
        results.append([rest.logits])
    assert_close(results[1], results[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(decoder, reentrant):
    want = run(decoder, "eager", input_ids=ids, attention_mask=left_padded, real=left_padded)
    decoder.train()
    decoder.gradient_checkpointing_enable({"use_reentrant": reentrant})
    try:
        inputs = {"input_ids": ids, "attention_mask": left_padded, "use_cache": False}
        got = run(decoder, "tilewise", real=left_padded, **inputs)
    finally:
        decoder.gradient_checkpointing_disable()
        decoder.eval()
    assert_close(got, want)


@pytest.mark.parametrize("case", ["none", "left", "packed", "cu_seq_lens"])
def test_compiled_without_breaks(case):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = transformers.AutoModelForCausalLM.from_config(
        DECODERS["mistral"](), attn_implementation="tilewise"
    ).eval()
    inputs = {"input_ids": ids[:1], "use_cache": False}
    if case == "left":
        inputs["attention_mask"] = left_padded[:1]
    elif case == "packed":
        inputs["position_ids"] = starts_again
    elif case == "cu_seq_lens":
        inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    real = inputs.get("attention_mask")
    want = run(model, "tilewise", real=real, **inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(run(model, "tilewise", real=real, call=compiled, **inputs), want)


@pytest.mark.parametrize("case", ["none", "left", "packed"])
def test_layers_compiled_one_by_one(case):
    """Their masks are made outside and come in as ``PatternMask``."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = transformers.AutoModelForCausalLM.from_config(DECODERS["mistral"]()).eval()
    inputs = {"input_ids": ids[:1], "use_cache": False}
    if case == "left":
        inputs["attention_mask"] = left_padded[:1]
    elif case == "packed":
        inputs["position_ids"] = starts_again
    real = inputs.get("attention_mask")
    want = run(model, "tilewise", real=real, **inputs)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_close(run(model, "tilewise", real=real, **inputs), want)


def test_generate_compiled_with_a_static_cache():
    torch.manual_seed(0)
    torch.compiler.reset()
    model = transformers.AutoModelForCausalLM.from_config(DECODERS["mistral"]()).eval()
    tokens = []
    for name in ("eager", "tilewise"):
        model.set_attn_implementation(name)
        found = model.generate(
            ids,
            attention_mask=left_padded,
            max_new_tokens=6,
            do_sample=False,
            cache_implementation="static",
            compile_config=transformers.CompileConfig(backend="aot_eager", mode=None),
        )
        tokens.append(found)
    assert torch.equal(*tokens)


# Other kinds of models


def built(name, **numbers):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**numbers)
    return (
        getattr(transformers, f"{name}Model")
        ._from_config(config, attn_implementation="eager")
        .eval()
    )


ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_bert(padding):
    model = built("Bert", **ENCODER, num_attention_heads=4, vocab_size=VOCAB, initializer_range=0.2)
    mask = {"none": None, "left": left_padded, "right": right_padded}[padding]
    assert_equals_eager(model, input_ids=ids, attention_mask=mask, real=mask)


def test_bert_as_decoder_with_cross_attention():
    numbers = {"is_decoder": True, "add_cross_attention": True, "num_attention_heads": 4}
    model = built("Bert", **ENCODER, **numbers, vocab_size=VOCAB, initializer_range=0.2)
    other = torch.randn(B, 9, 32)
    mask = torch.ones(B, 9, dtype=torch.long)
    mask[1, 4:] = 0
    assert_equals_eager(
        model, input_ids=ids, encoder_hidden_states=other, encoder_attention_mask=mask
    )


def test_vit():
    model = built("ViT", **ENCODER, num_attention_heads=4, image_size=16, patch_size=4)
    assert_equals_eager(model, pixel_values=torch.randn(B, 3, 16, 16))


def test_modernbert_window_to_both_sides():
    numbers = {"num_attention_heads": 4, "local_attention": 8, "global_attn_every_n_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1}
    model = built(
        "ModernBert", **ENCODER, **numbers, **special, sep_token_id=2, vocab_size=VOCAB,
        initializer_range=0.2,
    )  # fmt: skip
    assert_equals_eager(model, input_ids=ids)
    assert_equals_eager(model, input_ids=ids, attention_mask=right_padded, real=right_padded)


def test_t5_position_bias():
    numbers = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = built("T5", **numbers, vocab_size=VOCAB, decoder_start_token_id=0)
    inputs = {"input_ids": ids, "attention_mask": right_padded, "decoder_input_ids": ids[:, :7]}
    assert_equals_eager(model, **inputs)


def whisper():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=16, max_target_positions=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
        suppress_tokens=None, init_std=0.3,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()


def test_whisper():
    model, sound = whisper(), torch.randn(B, 8, 32)
    assert_equals_eager(model, input_features=sound, decoder_input_ids=ids[:, :9])
    tokens = []
    for name in ("eager", "tilewise"):
        model.set_attn_implementation(name)
        tokens.append(model.generate(sound, max_new_tokens=8, do_sample=False))
    assert torch.equal(*tokens)


def test_a_vision_tower():
    torch.manual_seed(0)
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 2,
        "temporal_patch_size": 1, "spatial_merge_size": 2, "mlp_ratio": 1,
    }  # fmt: skip
    text = {**SMALL, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    text.pop("head_dim")
    config = transformers.Qwen2VLConfig(
        text_config=text, vision_config=vision, image_token_id=3, video_token_id=4,
        vision_start_token_id=5, vision_end_token_id=6,
    )  # fmt: skip
    model = transformers.Qwen2VLForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]])  # 4 and 6 tokens after merging
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 2)
    row = [8, 5, *[3] * 4, 6, 9, 5, *[3] * 6, 6, 10, 11]
    tokens = torch.tensor([row])
    inputs = {"input_ids": tokens, "pixel_values": patches, "image_grid_thw": grid}
    inputs["mm_token_type_ids"] = (tokens == 3).long()
    assert_equals_eager(model, **inputs)


# The interface itself


def call(q, k, v, mask=None, is_causal=True, **further):
    """(batch, nheads, seqlen, head_dim), as transformers calls."""
    module = SimpleNamespace(is_causal=is_causal)
    out, weights = integration.attention(module, q, k, v, mask, **further)
    assert weights is None
    return out.transpose(1, 2)


def test_c03_the_diagonal_ends_bottom_right():
    k, v = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 5, 4)
    out = call(torch.zeros(1, 1, 2, 4), k, v)
    torch.testing.assert_close(out[0, 0, 0], v[0, 0, :4].mean(0))
    torch.testing.assert_close(out[0, 0, 1], v[0, 0].mean(0))


@pytest.mark.parametrize("window", [1, 3, 6, 9])
def test_c07_a_window_of_w_is_w_keys(window):
    q, k, v = torch.zeros(1, 1, 6, 4), torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    out = call(q, k, v, sliding_window=window)
    for i in range(6):
        torch.testing.assert_close(out[0, 0, i], v[0, 0, max(0, i - window + 1) : i + 1].mean(0))
    step = call(q[:, :, -1:], k, v, sliding_window=window)
    torch.testing.assert_close(step, out[:, :, -1:])


def test_c13_packed_ids_in_a_batch():
    ids = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    out = call(q, k, v, position_ids=ids)
    documents = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])
    same = (documents[:, :, None] == documents[:, None])[:, None] & causal(5)
    torch.testing.assert_close(out, call(q, k, v, same))
    late = call(q, k, v, position_ids=torch.arange(7, 12)[None])
    torch.testing.assert_close(late, call(q, k, v))


def test_masks_of_two_dimensions():
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    keep = torch.ones(2, 7, dtype=torch.long)  # shorter than a static cache
    keep[1, :3] = 0
    seen = (causal(7)[2:] & keep.bool()[:, None])[:, None]
    want = call(q, k[:, :, :7], v[:, :, :7], seen)
    torch.testing.assert_close(call(q, k, v, keep), want)
    longer = torch.cat([torch.ones(2, 2, dtype=torch.long), keep], 1)  # a sliding cache's past
    torch.testing.assert_close(call(q, k[:, :, :7], v[:, :, :7], longer[:, :9]), want)


@pytest.mark.parametrize("kind", ["causal", "window", "both sides", "packed", "padding", "later"])
def test_pattern_masks_stand_for_the_dense_mask(kind):
    from transformers import masking_utils as hf

    if not hasattr(hf, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers makes masks of other parts")
    function = {
        "window": hf.sliding_window_causal_mask_function(3),
        "both sides": hf.sliding_window_bidirectional_mask_function(2),
    }.get(kind, hf.causal_mask_function)
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    if kind == "packed":
        ids = torch.tensor([[0, 1, 0, 1, 2, 0], [3, 4, 5, 6, 0, 1]])
        remapped = hf.remap_positions_for_packed_sequence(function, ids)
        numbers = hf.packed_sequence_mask_function(hf.find_packed_sequence_indices(ids))
        arguments["mask_function"] = hf.and_masks(remapped, numbers)
    if kind == "padding":
        arguments["attention_mask"] = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 0]]).bool()
    if kind == "later":  # a prefix in a cache
        arguments |= {"q_length": 2, "q_offset": 4}
    mask = integration.mask(**arguments)
    want = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert isinstance(mask, PatternMask)
    assert mask.shape == want.shape
    assert torch.equal(mask.dense(), want)
    looked_at = mask & torch.ones(6, dtype=torch.bool)
    assert type(looked_at) is torch.Tensor and torch.equal(looked_at, want)


def test_patterns_that_are_not_known_stay_dense():
    from transformers import masking_utils as hf

    if not hasattr(hf, "blockwise_overlay"):
        pytest.skip("this transformers makes masks of other parts")
    image = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    chunked = hf.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    for function in (chunked, hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(image))):
        arguments = {"batch_size": 1, "q_length": 8, "kv_length": 8, "mask_function": function}
        mask = integration.mask(**arguments)
        assert type(mask.exact) is torch.Tensor
        assert torch.equal(mask.dense(), hf.sdpa_mask(**arguments, allow_is_causal_skip=False))


def test_memory_of_a_long_padded_row_stays_linear():
    from transformers import masking_utils as hf

    seqlen = 2**17  # the dense mask would be 16 GiB
    keep = torch.ones(1, seqlen, dtype=torch.bool)
    keep[0, 0] = False
    lengths = {"batch_size": 1, "q_length": seqlen, "kv_length": seqlen}
    function = hf.sliding_window_causal_mask_function(64)
    mask = integration.mask(**lengths, mask_function=function, attention_mask=keep)
    assert isinstance(mask, PatternMask) and mask.shape == (1, 1, seqlen, seqlen)
    x = torch.randn(1, 1, seqlen, 4)
    assert call(x, x, x, mask).shape == x.shape


def test_what_is_not_known_is_refused():
    x = torch.randn(1, 1, 4, 8)
    assert call(x, x, x, use_cache=True, labels=torch.ones(4), unknown=None).shape == x.shape
    for further in (
        {"output_attentions": True},
        {"indices": torch.zeros(1, 4, 2)},
        {"head_mask": torch.ones(1)},
        {"block_table": torch.zeros(1, 1)},
    ):
        with pytest.raises(tilewise.UnsupportedError, match=next(iter(further))):
            call(x, x, x, **further)
    for mask in (torch.ones(4, 4, 4), torch.ones(1, 4), torch.ones(1, 1, 4, 4).long()):
        with pytest.raises(tilewise.InvalidInputError, match="attention_mask"):
            call(x, x, x, mask)
    with pytest.raises(tilewise.InvalidInputError, match="sliding_window"):
        call(x, x, x, sliding_window=0)
    with pytest.raises(tilewise.InvalidInputError, match="cu_seq_lens_k"):
        call(x, x, x, cu_seq_lens_q=torch.tensor([0, 4]))


def test_boundaries_beside_a_mask_or_bias():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    cu = torch.tensor([0, 2, 6])
    same = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool()
    keep = torch.tensor([[True, True, False, True, True, True]])
    want = call(q, k, v, (same & causal(6) & keep)[None, None])
    packing = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone()}
    for mask in (keep, (causal(6) & keep)[None, None]):
        torch.testing.assert_close(call(q, k, v, mask, **packing), want)
    bias = torch.randn(1, 2, 6, 6)
    want = call(q, k, v, bias.masked_fill(~(same & causal(6)), -math.inf))
    torch.testing.assert_close(call(q, k, v, position_bias=bias, **packing), want)
    added = bias.masked_fill(~causal(6), -math.inf)
    torch.testing.assert_close(call(q, k, v, added, **packing), want)
    packing["cu_seq_lens_k"] = torch.tensor([0, 3, 6])
    with pytest.raises(tilewise.UnsupportedError, match="cu_seq_lens_k"):
        call(q, k, v, keep, **packing)


def test_dropout_drops():
    x = torch.randn(1, 2, 64, 8)
    assert not torch.equal(call(x, x, x, dropout=0.5), call(x, x, x))


def test_an_old_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"4\.57\.6"):
        integration.register()


BERT_LIKE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
OWN_ATTENTION = {
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4
    ),
    "mpt": lambda: transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCAB),
    "megatron-bert": lambda: transformers.MegatronBertConfig(**BERT_LIKE),
    "roformer": lambda: transformers.RoFormerConfig(**BERT_LIKE),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_models_with_attention_of_their_own_are_refused(name, compiled):
    """They would add the mask to scores, or hide where it is True."""
    config = OWN_ATTENTION[name]()
    kind = transformers.AutoModelForCausalLM if name in ("bloom", "mpt") else transformers.AutoModel
    model = kind.from_config(config, attn_implementation="tilewise").eval()
    call = torch.compile(model, backend="eager") if compiled else model
    torch._dynamo.reset()
    with pytest.raises(Exception, match="attention interface"), torch.no_grad():
        call(ids, attention_mask=right_padded)


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.__iand__(True),
        lambda m: m.__ior__(True),
        lambda m: m.__setitem__((slice(None), slice(None), slice(None), 0), False),
        lambda m: m.masked_fill_(torch.ones(4, dtype=torch.bool), False),
        lambda m: m.fill_(False),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_pattern_mask_cannot_be_written_to(write, batch):
    mask = PatternMask((batch, 1, 4, 4), torch.device("cpu"), Band(-1, 0))
    with pytest.raises(tilewise.UnsupportedError, match="clone it first"):
        write(mask)
    assert torch.equal(mask.dense(), torch.ones(4, 4).tril().bool().expand(batch, 1, 4, 4))
    assert torch.equal(copy.deepcopy(mask).dense(), mask.dense())


def test_t5_generates_with_a_static_cache():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0,
        eos_token_id=None, decoder_start_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration._from_config(config).eval()
    found = []
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": "static"}
        found.append(model.generate(ids, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("mask", [None, right_padded], ids=["none", "padded"])
def test_a_model_without_values(mask):
    config = DECODERS["llama"]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="tilewise"
        )
    given = None if mask is None else mask.to("meta")
    assert model(ids.to("meta"), attention_mask=given).logits.shape == (B, S, VOCAB)
    with FakeTensorMode():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="tilewise"
        )
        given = None if mask is None else torch.ones(B, S, dtype=torch.long)
        out = model(torch.ones(B, S, dtype=torch.long), attention_mask=given)
        assert out.logits.shape == (B, S, VOCAB)
