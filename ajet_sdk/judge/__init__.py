"""``ajet judge``: judges what awaits a judgement, by a model, a function or a command.

`judges` asks these, `work` leases and posts. What is decided without I/O is in `ajet_sdk.rewards.judging`.
"""
