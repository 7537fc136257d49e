#!/bin/sh
# Qwen Code, as npm installs it, on a task in an empty folder; nothing in it knows ajet.
#
#   ajet run --task greeting --repeat 8 --parallel 4 -- sh integrations/with_qwen_code.sh
#
# It finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code of the last line, a check of
# what the agent has done, becomes the reward. Its memory is off: it would carry one episode over into the next, and
# asks the model for more than the task. `--yolo` lets the model run any command: give it a container of its own.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir .qwen
echo '{"memory": {"enableManagedAutoMemory": false}}' >.qwen/settings.json
OPENAI_MODEL=policy qwen --yolo "Write the word hello into greeting.txt"
grep -qx hello greeting.txt
