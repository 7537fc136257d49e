from __future__ import annotations

from ajet_trainer.trained_batches import ANY, TrainedBatch, TrainedBatches

A, B = TrainedBatch("a", 1, ("e1", "e2")), TrainedBatch("b", 2, ("e3",))


def test_only_saved_batches_wait_for_their_acknowledgement() -> None:
    batches = TrainedBatches()
    batches.trained(A)
    assert batches.unacknowledged == ()
    assert batches.unsaved == (A,)
    assert batches.blocked(ANY) == {"e1", "e2"}
    batches.saved()
    assert batches.unacknowledged == (A,)
    assert batches.unsaved == ()
    batches.acknowledged(A)
    assert batches.unacknowledged == ()
    assert batches.blocked(ANY) == frozenset()


def test_the_state_of_a_checkpoint_holds_what_was_trained_up_to_it() -> None:
    batches = TrainedBatches()
    batches.trained(A)
    batches.saved()
    batches.trained(B)
    restored = TrainedBatches.from_state(batches.state())
    assert restored.unacknowledged == (A, B)
    assert restored.unsaved == ()
    assert TrainedBatches.from_state({}).unacknowledged == ()


def test_a_refused_batch_blocks_its_episodes_for_good_even_over_a_restart() -> None:
    batches = TrainedBatches([A, B])
    batches.refused(A)
    assert batches.unacknowledged == (B,)
    assert batches.blocked(ANY) == {"e1", "e2", "e3"}
    again = TrainedBatches.from_state(batches.state())
    again.acknowledged(B)
    assert again.blocked(ANY) == {"e1", "e2"}


def test_the_same_name_at_two_daemons_is_two_episodes() -> None:
    batches = TrainedBatches()
    batches.trained(TrainedBatch("b1", 1, ("run-1",), "http://a"))
    assert (batches.blocked("http://a"), batches.blocked("http://b")) == ({"run-1"}, frozenset())
    batches.saved()
    batches.refused(batches.unacknowledged[0])
    again = TrainedBatches.from_state(batches.state(), ("http://a", "http://b"))
    assert (again.blocked("http://a"), again.blocked("http://b")) == ({"run-1"}, frozenset())


def test_what_a_daemon_gave_whose_url_is_not_in_use_is_blocked_everywhere() -> None:
    filtered = {"e2": "too_long: 9 tokens"}
    batches = TrainedBatches([TrainedBatch("b1", 1, ("e1",), "http://a", filtered)], [("http://a", "e0")])
    moved = TrainedBatches.from_state(batches.state(), ("http://new", "http://b"))
    assert moved.blocked("http://new") == moved.blocked("http://b") == {"e0", "e1"}
    assert moved.unacknowledged == (TrainedBatch("b1", 1, ("e1",), ANY, filtered),)
