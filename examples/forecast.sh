#!/usr/bin/env bash
# Will it fit? From a model's name to a verdict, offline. Every line is a command that you can run yourself.
set -euo pipefail
cd "$(dirname "$0")/.."
overspill=.venv/bin/overspill
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The first minute: every method on the common cards.
$overspill forecast Qwen/Qwen2.5-7B

# One of them in full.
$overspill forecast Qwen/Qwen2.5-7B --method qlora --gpu rtx4090 --micro-batch 2 --seq-len 2048 --plot "$scratch/step.svg"
test -s "$scratch/step.svg"

# Two jobs beside each other.
$overspill forecast Qwen/Qwen2.5-7B --method lora --gpu rtx4090 --diff Qwen/Qwen3-8B

# The answer for a program.
$overspill forecast --params 7B --method lora --gpu a100-80gb --json | .venv/bin/python -c '
import json, sys
forecast = json.load(sys.stdin)
assert forecast["verdict"] in ("fits", "tight", "does not fit"), forecast["verdict"]
print("a model of 7 billion parameters:", forecast["verdict"])
'
