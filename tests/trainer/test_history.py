from __future__ import annotations

from ajet_trainer.history import Entry, History

A, B = Entry("a", 1, ("e1", "e2")), Entry("b", 2, ("e3",))


def test_only_saved_batches_wait_for_their_acknowledgement() -> None:
    history = History()
    history.trained(A)
    assert history.unacknowledged == ()
    assert history.unsaved == (A,)
    assert history.blocked == {"e1", "e2"}
    history.saved()
    assert history.unacknowledged == (A,)
    assert history.unsaved == ()
    history.acknowledged("a")
    assert history.unacknowledged == ()
    assert history.blocked == frozenset()


def test_the_state_of_a_checkpoint_holds_what_was_trained_up_to_it() -> None:
    history = History()
    history.trained(A)
    history.saved()
    history.trained(B)
    restored = History.from_state(history.state())
    assert restored.unacknowledged == (A, B)
    assert restored.unsaved == ()
    assert History.from_state({}).unacknowledged == ()


def test_a_refused_batch_blocks_its_episodes_for_good_even_over_a_restart() -> None:
    history = History([A, B])
    history.refused("a")
    assert history.unacknowledged == (B,)
    assert history.blocked == {"e1", "e2", "e3"}
    again = History.from_state(history.state())
    again.acknowledged("b")
    assert again.blocked == {"e1", "e2"}
