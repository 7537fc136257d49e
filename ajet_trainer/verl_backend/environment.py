"""The environment variables of a run's processes: set before torch or verl are imported, hence a file of their own."""

from __future__ import annotations

import os


def environment(device: str) -> dict[str, str]:
    """Variables for every process of the run, this one included. What is set already stays as it is."""
    values = {
        "TRANSFER_QUEUE_ENABLE": "1",
        "VERL_LOGGING_LEVEL": "WARN",
        "TQ_LOGGING_LEVEL": "WARN",
        "VLLM_LOGGING_LEVEL": "WARN",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "TQ_NUM_THREADS": str(min(8, os.cpu_count() or 1)),
    }
    if device == "cpu":
        values |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(os.cpu_count() or 1),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "RAY_worker_niceness": "0",  # Ray's 15 lets agents on the same cores starve trainer and engine
        }
    return {name: os.environ.get(name, value) for name, value in values.items()}
