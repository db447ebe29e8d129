"""The vLLM engine: vLLM in a child process of the worker, which cannot outlive it.

adapters         LoRA adapters in vLLM's slot for them
checkpoint_form  tensors of mixtures of experts as their checkpoints have them
core             vLLM itself; it, `adapters`, `ranks`, `repacked` and `vision` alone import it
engine           the worker's side
images           the images of a request, between worker and child
memory           tensors in memory that worker and child map
packed           packed copies of the matrices of a CPU's model
process          the child's process
ranks            the processes that vLLM starts in the child's, one a card
releases         the admitted releases of vLLM, and the differences between them
repacked         published weights into layers that vLLM quantizes or packs
step_progress    tokens so far, and whether the steps advance
targets          the targets of published tensors in vLLM's parameters
token_versions   the version of each token of a response
vision           vision-language models in vLLM
weights          published weights from shared memory into vLLM's parameters
wire             messages between worker and child
"""

from pipeline.rollout.generation.vllm.engine import new_engine

__all__ = ["new_engine"]
