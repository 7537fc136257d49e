#!/bin/sh
# opencode, as npm installs it, on a copy of a small repository. The copy is named after the episode, where check.py
# finds it. The model can run any command, so run it in a container.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=${TMPDIR:-/tmp}/coding/$AJET_EPISODE
mkdir -p "$(dirname "$work")"
cp -r "$here/repo" "$work"
cp "$here/opencode.json" "$work"
cd "$work"
opencode run --model own/policy --title "$AJET_TASK" "$(printf %s "$AJET_TASK_JSON" | sed 's/.*"ask": *"\([^"]*\)".*/\1/')"
