"""Small models that vLLM takes, and what a model says of a response."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.support import tiny_vision

VOCABULARY_SIZE, EOS = 48, 1


def small_llama(seed, **changes):
    """A Llama with heads of 32: the least that vLLM's kernels on a CPU take."""
    settings = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, **changes}
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE, max_position_embeddings=512, pad_token_id=0, bos_token_id=None,
        eos_token_id=EOS, tie_word_embeddings=True, **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.15)
    return model.eval()


def small_qwen2_vl(seed, patch=tiny_vision.PATCH):
    """`tests.support.tiny_vision.model` with heads of 32 in both parts."""
    text = {
        **tiny_vision.TEXT,
        "hidden_size": 128,
        "rope_parameters": {**tiny_vision.ROTATION, "mrope_section": [4, 6, 6]},
    }
    sight = {**tiny_vision.SIGHT, "depth": 1, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "patch_size": patch}
    config = Qwen2VLConfig(text_config=text, vision_config=sight, **tiny_vision.TOKENS)
    return tiny_vision.seeded(Qwen2VLForConditionalGeneration, config, seed)


@torch.no_grad()
def log_probs_of(model, prompt, token_ids, temperature=1.0):
    """The log-probs of a response's tokens at the temperature, by one pass of the model."""
    ids = torch.cat([prompt, token_ids])
    logits = model(input_ids=ids[None]).logits[0].float() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, token_ids[:, None])[:, 0]
