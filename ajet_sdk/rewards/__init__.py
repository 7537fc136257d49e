"""The sources of rewards, and the decision who failed and what an episode earns. It is made here alone.

Nothing in this package does I/O. `sources` has where a reward may come from, each a `decision.Source`, and `decision`
decides. `numbers` reads what programs and graders print, `blame` tells whose failure an exception is, and `judging` has
what a model that judges is shown and what its votes come to.
"""
