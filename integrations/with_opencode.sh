#!/bin/sh
# opencode, as npm installs it, on a task in an empty folder.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_opencode.sh
#
# opencode is told of a server by its configuration, which can refer to the environment: OPENAI_BASE_URL leads it to the
# proxy, OPENAI_API_KEY is its episode. The exit code of the last line, a check of what the agent has done, becomes the
# reward. It has a title, which opencode asks the model for otherwise: a call beside the task would be trained with it.
# The permission lets the model run any command: give it a container of its own.
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
