#!/bin/sh
# Claude Code, as npm installs it, on a task in an empty folder. Nothing in it knows ajet.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_claude_code.sh
#
# It finds the proxy by ANTHROPIC_BASE_URL and its episode by ANTHROPIC_API_KEY. The last line checks the agent's
# work, and its exit code becomes the reward. The allowed tool runs any command, so run it in a container.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
claude --print "Write the word hello into greeting.txt" --model policy --allowedTools Bash
grep -qx hello greeting.txt
