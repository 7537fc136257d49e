#!/bin/sh
# Codex, as npm installs it, on a task in an empty folder.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_codex.sh
#
# Codex is told of a server by its configuration: OPENAI_BASE_URL leads it to the proxy, OPENAI_API_KEY is its episode.
# The exit code of the last line, a check of what the agent has done, becomes the reward. Without its sandbox the model
# can run any command: give it a container of its own.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model policy \
  --config 'model_provider="own"' --config 'model_providers.own.name="own"' \
  --config "model_providers.own.base_url=\"$OPENAI_BASE_URL\"" --config 'model_providers.own.env_key="OPENAI_API_KEY"' \
  "Write the word hello into greeting.txt" </dev/null
grep -qx hello greeting.txt
