#!/bin/sh
# Codex, as npm installs it, on a task in an empty folder.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_codex.sh
#
# Its configuration names the server: OPENAI_BASE_URL leads to the proxy, and OPENAI_API_KEY names the episode. The
# last line checks the agent's work, and its exit code becomes the reward. Without its sandbox the model can run any
# command, so run it in a container.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --model policy \
  --config 'model_provider="own"' --config 'model_providers.own.name="own"' \
  --config "model_providers.own.base_url=\"$OPENAI_BASE_URL\"" --config 'model_providers.own.env_key="OPENAI_API_KEY"' \
  "Write the word hello into greeting.txt" </dev/null
grep -qx hello greeting.txt
