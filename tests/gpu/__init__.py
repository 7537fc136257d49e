"""Programs for a machine with a GPU, in front of which nothing of ajet has run yet. They need `make setup` there, or an
environment with torch, vLLM, verl and the `proxy` extra.

    python -m tests.gpu.machine [--engine]                  what the machine is, and what can be imported: a minute
    python -m tests.gpu.game hybrid FOLDER --steps 14       the quick start's game; verl launches vLLM on the same GPU
    python -m tests.gpu.game attached FOLDER [--lora 16]    the same with a vLLM that stands alone and goes on
    python -m tests.gpu.models FOLDER 0.5b                  a model of a real size, with random weights
    python -m tests.bench.training --model FOLDER/0.5b --dtype bf16 --limit 16384 --rounds 1
    python -m tests.bench.gate --model DIR --updates 30     how long a push holds agents

`tests/gpu/test_rehearsal.py` plays the game without a GPU.
"""
