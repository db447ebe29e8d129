"""The variables of a process that imports vLLM, which reads most of them as it is imported."""

from __future__ import annotations

from collections.abc import Mapping


def vllm_environment(environment: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    """Return an environment with those of every engine."""
    changed = {
        **environment,
        # Scheduler and model in one process: a grandchild would be known to vLLM alone.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A rank runs the main module of the engine's process (`process`), so that it ends with it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM reports its use to its makers otherwise.
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        # Models are folders of this machine.
        "VLLM_USE_MODELSCOPE": "0",
        # vLLM's records go through this package's handler.
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    if on_cpu:
        # Otherwise all engines of a machine bind their threads to the same cores.
        changed["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Two functions of the sampler would be compiled by a C++ compiler at the first token.
        changed["TORCHDYNAMO_DISABLE"] = "1"
    if "://" in changed.get("VLLM_PORT", ""):
        # Kubernetes sets it in every container if a service is called vllm; vLLM refuses it.
        del changed["VLLM_PORT"]
    return changed
