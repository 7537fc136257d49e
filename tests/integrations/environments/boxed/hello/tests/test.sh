#!/bin/bash
# The folder of the box is beside this one, also where the box is no container.
here=$(dirname "$0")/..
reward=0
grep -q hello "$here/app/greeting.txt" && reward=1
echo $reward >"$here/logs/verifier/reward.txt"
