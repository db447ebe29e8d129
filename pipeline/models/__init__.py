"""The networks: loading, log-probs, values, rewards, adapters.

chunked_log_probs  log-probs with a bound on the logits in memory
critic             a language model with a value head
device             the process's device and its allocator
expected           the tensors that a publish must hold
inputs             arguments of a forward pass over whole rows
loading            models and tokenizers from local folders
log_probs          log-probs and values of action tokens
lora               LoRA adapters
packing            one forward pass over rows laid end to end
reward_model       a reward model
vision_inputs      Qwen2-VL's arguments of a forward pass
weights            published policy versions in shared memory
"""
