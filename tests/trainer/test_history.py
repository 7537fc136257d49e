from __future__ import annotations

from ajet_trainer.history import ANY, Entry, History

A, B = Entry("a", 1, ("e1", "e2")), Entry("b", 2, ("e3",))


def test_only_saved_batches_wait_for_their_acknowledgement() -> None:
    history = History()
    history.trained(A)
    assert history.unacknowledged == ()
    assert history.unsaved == (A,)
    assert history.blocked(ANY) == {"e1", "e2"}
    history.saved()
    assert history.unacknowledged == (A,)
    assert history.unsaved == ()
    history.acknowledged(A)
    assert history.unacknowledged == ()
    assert history.blocked(ANY) == frozenset()


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
    history.refused(A)
    assert history.unacknowledged == (B,)
    assert history.blocked(ANY) == {"e1", "e2", "e3"}
    again = History.from_state(history.state())
    again.acknowledged(B)
    assert again.blocked(ANY) == {"e1", "e2"}


def test_the_same_name_at_two_daemons_is_two_episodes() -> None:
    history = History()
    history.trained(Entry("b1", 1, ("run-1",), "http://a"))
    assert (history.blocked("http://a"), history.blocked("http://b")) == ({"run-1"}, frozenset())
    history.saved()
    history.refused(history.unacknowledged[0])
    again = History.from_state(history.state(), ("http://a", "http://b"))
    assert (again.blocked("http://a"), again.blocked("http://b")) == ({"run-1"}, frozenset())


def test_what_a_daemon_gave_whose_url_is_not_in_use_is_blocked_everywhere() -> None:
    filtered = {"e2": "too_long: 9 tokens"}
    history = History([Entry("b1", 1, ("e1",), "http://a", filtered)], [("http://a", "e0")])
    moved = History.from_state(history.state(), ("http://new", "http://b"))
    assert moved.blocked("http://new") == moved.blocked("http://b") == {"e0", "e1"}
    assert moved.unacknowledged == (Entry("b1", 1, ("e1",), ANY, filtered),)


def test_a_checkpoint_of_the_time_before_several_daemons_is_read() -> None:
    state = {"saved": [{"batch": "b1", "version": 1, "episodes": ["e1"]}], "lost": ["e0"]}
    history = History.from_state(state, ("http://a",))
    assert history.unacknowledged == (Entry("b1", 1, ("e1",), ANY),)
    assert history.blocked("http://a") == {"e0", "e1"}
