"""The whole loop on one machine without a GPU: SmolLM2, vLLM's CPU build, the proxy, verl and an unmodified agent.

`plan` says what is run, `programs` starts and ends the programs, and `loop` paces the agents against the trainer.
`session` turns one run into `figures`, a picture (`plot`) and a page. `proof` repeats runs against a control that
cannot learn. Nothing here takes part in training: every part is the one that users run.
"""
