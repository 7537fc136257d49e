"""The whole loop on one machine without a GPU: SmolLM2, vLLM's CPU build, the proxy, verl and an unmodified agent.

`plan` says what is run, `machine` and `children` start and end the programs, `loop` paces the agents against the
trainer, and `figures`, `plot` and `page` turn what was recorded into numbers, a picture and a page. `proof` repeats
runs against a control that cannot learn. Nothing here takes part in training: every part is the one that users run.
"""
