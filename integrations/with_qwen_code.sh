#!/bin/sh
# Qwen Code, as npm installs it, on a task in an empty folder. Nothing in it knows ajet.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_qwen_code.sh
#
# It finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The last line checks the agent's work, and
# its exit code becomes the reward. Its memory is off: it would carry one episode into the next, and make more calls.
# `--yolo` lets the model run any command, so run it in a container.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir .qwen
echo '{"memory": {"enableManagedAutoMemory": false}}' >.qwen/settings.json
OPENAI_MODEL=policy qwen --yolo "Write the word hello into greeting.txt"
grep -qx hello greeting.txt
