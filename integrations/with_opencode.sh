#!/bin/sh
# opencode, as npm installs it, on a task in an empty folder.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_opencode.sh
#
# Its configuration names the server and refers to the environment: OPENAI_BASE_URL leads to the proxy, and
# OPENAI_API_KEY names the episode. The last line checks the agent's work, and its exit code becomes the reward. The
# title is given, or opencode would ask the model for one, and that call would be trained too. The permission lets the
# model run any command, so run it in a container.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >opencode.json <<'EOF_JSON'
{
  "provider": {
    "own": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"policy": {}}
    }
  },
  "permission": "allow",
  "share": "disabled",
  "autoupdate": false
}
EOF_JSON
opencode run --model own/policy --title greeting "Write the word hello into greeting.txt"
grep -qx hello greeting.txt
