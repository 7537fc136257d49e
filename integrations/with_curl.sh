#!/bin/sh
# An agent in a shell script, with only curl. Its base URL names the episode, and a header rewards it.
#
#   AJET_PROXY_URL=http://127.0.0.1:8484 sh integrations/with_curl.sh 'What is 17 + 25?' 42
#
# It needs no SDK and no `ajet run`: an episode in the path opens on its first call. The reward is 1 if the answer
# holds the second argument, else 0. It comes with a request for the list of models. It is final, so it seals the
# episode.
set -eu
question=$1
wanted=$2
url=${AJET_PROXY_URL:-http://127.0.0.1:8484}/e/curl-$(date +%s)-$$/v1
ask() { curl -sSf -H "Authorization: Bearer ${AJET_API_KEY:-none}" "$@"; }

model=$(ask "$url/models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)
quoted=$(printf '%s' "$question" | sed 's/[\\"]/\\&/g')
answer=$(ask "$url/chat/completions" -H 'Content-Type: application/json' -H "X-AJet-Task: $question" -d @- <<EOF_BODY
{"model": "$model", "max_tokens": 32, "messages": [{"role": "user", "content": "$quoted"}]}
EOF_BODY
)
case $(printf '%s' "$answer" | grep -o '"content": *"[^"]*"') in
  *"$wanted"*) reward=1 ;;
  *) reward=0 ;;
esac
ask -o /dev/null "$url/models" -H "X-AJet-Reward: $reward" -H 'X-AJet-Final: 1'
echo "reward $reward"
