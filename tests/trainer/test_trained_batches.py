from __future__ import annotations

from ajet_trainer.trained_batches import TrainedBatch, TrainedBatches

A, B = TrainedBatch("a", 1, ("e1", "e2")), TrainedBatch("b", 2, ("e3",), {"e4": "too_long: 9 tokens"})


def test_only_saved_batches_wait_for_their_acknowledgement() -> None:
    batches = TrainedBatches()
    batches.trained(A)
    assert batches.unacknowledged == ()
    assert batches.unsaved == (A,)
    assert batches.blocked == {"e1", "e2"}
    batches.saved()
    assert batches.unacknowledged == (A,)
    assert batches.unsaved == ()
    batches.acknowledged(A)
    assert batches.unacknowledged == ()
    assert batches.blocked == frozenset()


def test_the_state_of_a_checkpoint_holds_what_was_trained_up_to_it() -> None:
    batches = TrainedBatches()
    batches.trained(A)
    batches.saved()
    batches.trained(B)
    batches.line = "the line of a step"
    restored = TrainedBatches.from_state(batches.state())
    assert restored.unacknowledged == (A, B)
    assert (restored.unsaved, restored.line) == ((), batches.line)
    assert TrainedBatches.from_state({}).unacknowledged == ()


def test_a_refused_batch_blocks_its_episodes_for_good_even_over_a_restart() -> None:
    batches = TrainedBatches([A, B])
    batches.refused(A)
    assert batches.unacknowledged == (B,)
    assert batches.blocked == {"e1", "e2", "e3"}
    again = TrainedBatches.from_state(batches.state())
    again.acknowledged(B)
    assert again.blocked == {"e1", "e2"}
