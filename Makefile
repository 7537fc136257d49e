# make setup       builds .venv and .venv-engine (the other targets do it too, once)
# make quickstart  trains a real language model from an unmodified agent, on this machine
# make proof       repeats the quick start with several seeds (SEEDS=5) and against a control that does not learn
# make tutorials   runs the nine tutorials of docs/start on real vLLM and verl, into runs/tutorials (NAMES="math live": these)
# make pictures    the owner's page as the README shows it, from the newest run in runs/ (RUN=DIR: another; needs Chromium)
# make test        lint, types, and all tests in both environments but those of the next two
# make check       lint, types, and the tests of the core, the SDK and the pages: the edit loop
# make test-integrations  each framework and program of integrations/, in an environment of its own
# make test-page   the owner's page in headless Chromium (Debian's package chromium)
# make lint        ruff and mypy alone
# make bench       the figures of the proxy and the SDK
# make bench-litellm  installs LiteLLM's proxy, which make bench then compares with
# make idle-close  10,000 requests, each timed at the moment in which the engine closes its idle connection
# make soak        30 minutes of 1,000 scripted agents: memory, descriptors, latency (docs/reports/soak.md)
# make gate        how long agents wait for 100 weight updates, with real vLLM (MODEL=DIR: another model than the tiny one)
# make overlap     what it gains that agents play while a step trains: reward by time, staleness, idle shares (STEPS=N, ROUNDS=N)
# make sampling    how far a trainer's probabilities are from the engine's, by how agents sample (MODEL=DIR: another model than SmolLM2)
# make open-episodes  what others wait for while long open episodes are looked at, and the memory of 1,000 turns (docs/reports/real-days.md)
# make step        seconds and memory of a training step on a fixed batch (MODEL=DIR: another model than SmolLM2; STEPS=N)
# make credit      how fast a model learns from rewards on its turns, and from their sum (docs/reports/credit.md)
# make swarm       clients are killed, lanes share, rewards are edited while a model trains (SEEDS=N, OUT=DIR; docs/reports/swarm.md)
# make team        two models learn in one episode, or one of them alone, with a trainer each (SEEDS=N, OUT=DIR; docs/reports/team.md)
# make bench-training  seconds and memory of training calls, timelines and trees, by shape (MODEL=DIR: another model; ROUNDS=N)
# make curve       the quick start by trees and by timelines: rewards and seconds a step, in an hour (SEEDS=N, OUT=DIR)
# make puzzles     a model learns tasks of reasoning-gym, with a control (SEEDS=N, TASKS=NAMES, STEPS=N); goes on where it stopped
# make traffic     a model learns from what users say next, with two controls (SEEDS=N, STEPS=N; ESTIMATORS=1: on a tiny model); goes on where it stopped
# make conformance SUITE=DIR  another project's API tests, directly and through the proxy (docs/reports/conformance.md)
# make fuzz        mutated requests and answers, through the proxy and directly: 100,000 cases (docs/reports/fuzz.md)
# make faults      kills proxy, trainers, agents, supervisor and judges 200 times each, tears the journal, fills the disk (docs/reports/faults.md)
# make estimators  a step of every estimator, loss and mean of verl, written into docs/reference/estimators.md
# make families    rows of a small model of every family that verl loads, written into docs/reference/models.md
# make dist        wheel and source distribution, into dist/
# make clean       removes what the targets made, the environments included

.PHONY: setup estimators families quickstart proof tutorials pictures test check test-page test-integrations lint bench bench-litellm idle-close soak gate overlap sampling credit swarm team open-episodes step bench-training curve puzzles traffic conformance fuzz faults dist clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile

setup:
	@.ci/setup

quickstart: setup
	@.venv-engine/bin/python -m integrations.quickstart $(if $(DEVICE),--device $(DEVICE)) $(if $(MODEL),--model $(MODEL))

proof: setup
	@.venv-engine/bin/python -m integrations.quickstart --proof $(if $(SEEDS),--seeds $(SEEDS))

tutorials: setup
	@.ci/setup integrations reasoning-gym
	@.venv/bin/python -m tests.tutorials $(NAMES)

pictures: setup
	@.venv/bin/python -m tests.kit.pictures $(RUN)

test:
	@.ci/run

check:
	@.ci/run check

test-page:
	@.ci/setup daemon
	@command -v chromium chromium-browser google-chrome chrome >/dev/null || { echo "no Chromium on PATH: apt-get install chromium" >&2; exit 1; }
	@.venv/bin/python -m pytest -q tests/proxy/io/control/test_dashboard_browser.py

test-integrations:
	@.ci/setup
	@.ci/setup integrations
	@.venv/bin/python -m pytest -q -m "integrations or not integrations" tests/integrations

lint:
	@.ci/setup daemon
	@.ci/lint

bench: setup
	@.venv/bin/python -m tests.bench.overhead
	@.venv/bin/python -m tests.bench.imports
	@.venv/bin/python -m tests.bench.merge
	@.venv/bin/python -m tests.bench.control

bench-litellm:
	@.ci/setup litellm

idle-close:
	@.ci/setup daemon
	@.venv/bin/python -m tests.bench.idle_close $(REQUESTS)

soak:
	@.ci/setup daemon
	@.venv/bin/python -m tests.bench.soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(AGENTS),--agents $(AGENTS)) $(if $(TABLE),--table $(TABLE))

gate: setup
	@.venv-engine/bin/python -m tests.bench.gate $(if $(UPDATES),--updates $(UPDATES)) $(if $(MODEL),--model $(MODEL)) $(if $(AGENTS),--agents $(AGENTS))

overlap: setup
	@.venv-engine/bin/python -m tests.bench.overlap $(if $(STEPS),--steps $(STEPS)) $(if $(ROUNDS),--rounds $(ROUNDS))

sampling: setup
	@.venv-engine/bin/python -m tests.bench.sampling $(if $(MODEL),--model $(MODEL))

credit: setup
	@.venv-engine/bin/python -m tests.bench.credit $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS)) $(if $(OUT),--out $(OUT))

swarm: setup
	@.venv-engine/bin/python -m tests.bench.swarm $(PARTS) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS)) $(if $(OUT),--out $(OUT))

team: setup
	@.venv-engine/bin/python -m tests.bench.team $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS)) $(if $(OUT),--out $(OUT))

open-episodes:
	@.ci/setup daemon
	@.venv/bin/python -m tests.bench.open_episodes $(if $(TURNS),--turns $(TURNS))

step: setup
	@.venv-engine/bin/python -m tests.bench.step $(if $(MODEL),--model $(MODEL)) $(if $(STEPS),--steps $(STEPS))

bench-training: setup
	@.venv-engine/bin/python -m tests.bench.training $(if $(MODEL),--model $(MODEL)) $(if $(ROUNDS),--rounds $(ROUNDS))

curve: setup
	@.venv-engine/bin/python -m tests.bench.curve $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS)) $(if $(OUT),--out $(OUT))

puzzles: setup
	@.ci/setup integrations reasoning-gym
	@.venv-engine/bin/python -m tests.bench.puzzles $(if $(TASKS),--tasks $(TASKS)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS))

traffic: setup
	@.venv-engine/bin/python -m tests.bench.traffic $(if $(ESTIMATORS),--estimators) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(STEPS),--steps $(STEPS))

conformance:
	@.ci/setup daemon
	@.venv/bin/python -m tests.conformance $(SUITE) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

fuzz:
	@.ci/setup daemon
	@.venv/bin/python -m tests.fuzz $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(CASE),--case $(CASE))

faults:
	@.ci/setup daemon
	@.venv/bin/python -m tests.faults $(if $(SEED),--seed $(SEED)) $(if $(KILLS),--kills $(KILLS)) $(if $(OTHERS),--others $(OTHERS)) $(if $(AGENTS),--agents $(AGENTS)) $(if $(TEARS),--tears $(TEARS)) $(if $(WORKERS),--workers $(WORKERS)) $(if $(JUDGES),--judges $(JUDGES)) $(if $(CHATS),--chats $(CHATS))

estimators: setup
	@OMP_NUM_THREADS=1 .venv-engine/bin/python -m pytest -q tests/trainer/engine/every_choice.py

families: setup
	@OMP_NUM_THREADS=1 .venv-engine/bin/python -m pytest -q tests/trainer/engine/every_family.py

dist:
	@.ci/setup daemon
	@rm -rf dist
	@.ci/dist

clean:
	rm -rf .venv .venv-engine .venv-integrations .venv-conformance .venv-litellm .venv-uv .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
