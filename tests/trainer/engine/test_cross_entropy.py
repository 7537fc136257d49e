"""The stand-in for flash-attn's cross entropy, against torch's own."""

from __future__ import annotations

import pytest
import torch
import verl.utils.torch_functional as theirs

from ajet_trainer.backends.verl.cross_entropy import PIECE, cross_entropy_loss, stand_in

ROWS, WORDS = PIECE + 7, 50


def test_it_is_as_exact_as_torch() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(ROWS, WORDS, requires_grad=True), torch.randint(WORDS, (ROWS,))
    weights = torch.rand(ROWS)
    right_loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (right,) = torch.autograd.grad((right_loss * weights).sum(), logits)
    loss, extra = cross_entropy_loss(logits, labels)
    (ours,) = torch.autograd.grad((loss * weights).sum(), logits)
    assert torch.allclose(loss, right_loss, atol=1e-6) and not extra.any()
    assert torch.allclose(ours, right, atol=1e-6)


def test_half_precision_is_counted_in_float32_and_verl_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cross_entropy_loss", "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE"):
        monkeypatch.setattr(theirs, name, None, raising=False)
    torch.manual_seed(1)
    logits, labels = torch.randn(ROWS, WORDS).bfloat16(), torch.randint(WORDS, (ROWS,))
    right = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None]).squeeze(-1)
    assert not torch.allclose(theirs.logprobs_from_logits(logits, labels).float(), right, atol=1e-3)
    stand_in()
    found = theirs.logprobs_from_logits(logits, labels)
    assert found.dtype == torch.float32 and torch.allclose(found, right, atol=1e-6)
