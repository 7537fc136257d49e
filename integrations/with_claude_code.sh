#!/bin/sh
# Claude Code, as npm installs it, on a task in an empty folder; nothing in it knows ajet.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_claude_code.sh
#
# It finds the proxy by ANTHROPIC_BASE_URL and its episode by ANTHROPIC_API_KEY. The exit code of the last line, a check
# of what the agent has done, becomes the reward. The allowed tool runs any command: give it a container of its own.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
claude --print "Write the word hello into greeting.txt" --model policy --allowedTools Bash
grep -qx hello greeting.txt
