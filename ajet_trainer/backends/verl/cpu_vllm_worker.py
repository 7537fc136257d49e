"""The two methods of verl's vLLM worker extension that a CPU needs otherwise.

vLLM's CPU backend packs linear weights for oneDNN and drops the originals, so a plain second `load_weights` cannot
work; vLLM's own layerwise `reload_weights` can. It wants all weights in one pass, so they are collected first, which
costs one copy of the model in host memory for the length of a push.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CpuWorkerExtension(vLLMColocateWorkerExtension):  # type: ignore[misc]
    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = True
    ) -> None:
        """Takes one whole push from verl's `BucketedWeightSender` over shared memory."""
        received: list[tuple[str, torch.Tensor]] = []
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=True)
        receiver.receive_weights(
            on_bucket_received=lambda weights, _last: received.extend((n, t.clone()) for n, t in weights)
        )
        self.model_runner.reload_weights(weights_iterator=iter(received))

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: Any = None) -> None:
        """Does nothing, so that packed CPU modules stay as built; verl would mask out-of-vocabulary logits."""
