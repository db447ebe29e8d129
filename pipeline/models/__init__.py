"""The networks: loading, log-probs, values, rewards, adapters.

attention_kernels  the kernels of attention in a pass
card_attention     kernels of a card for rows end to end, and the choice among them
chunked_log_probs  log-probs with a bound on the logits in memory
compiled_layers    the choice of compiled decoder layers, by a trial
critic             a language model with a value head
device             the process's device and its allocator
expected           the tensors that a publish must hold
flat_rows          rows end to end and their actions, the input of passes
float32_linear     a linear layer of 16 bits with a result in float32
float32_logits     logits in float32 from a model of 16 bits
fused_kernels      norms and rotary positions by fewer kernels on a card
inputs             arguments of a forward pass over whole rows
layer_code         compiled code of decoder layers
layer_streaming    decoder layers in host memory, copied to the device one after the other
loading            models and tokenizers from local folders
log_probs          log-probs and values of action tokens
lora               LoRA adapters
packing            one forward pass over rows laid end to end
pass_size          rows of a forward pass, cut by tokens
position_limits    refusal of passes whose rows have positions that depend on each other
prefix_attention   attention of responses to prompts that are computed once
recomputation      decoder layers computed again in the backward pass
reward_model       a reward model
shared_images      images that rows of a pass have in common: the encoder computes each once
shared_prefix      passes that compute a prompt once for all its responses
tokenizer_file     the tokenizer as the files of a folder are; these files in checkpoints
varlen_attention   attention of packed rows, each by itself
vision_inputs      Qwen2-VL's arguments of a forward pass
weights            published policy versions in shared memory
"""
