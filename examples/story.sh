#!/usr/bin/env bash
# The whole story on a model that trains in seconds: a job file, the forecast, a run that is interrupted, the resume,
# the export, and the model's answer. Needs `make setup`; writes into a temporary directory.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
bin="$repository/.venv/bin"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

echo "== a small Llama with random weights, and a play"
PYTHONPATH="$repository" "$bin/python" -c 'from testing.tiny import make_tiny_model; make_tiny_model("tiny")'
cp "$repository/tests/assets/tiny/macbeth.txt" .

echo "== a job file with every key"
"$bin/overspill" new job.toml --model ./tiny --data macbeth.txt --memory 256MiB
settings=(--set train.steps=12 --set data.seq_len=64 --set train.micro_batch=4 --set optimizer.lr=3e-3
          --set plan.optimizer_state=disk --set plan.durability=step --set data.eval_fraction=0.05)

echo "== what it will need"
"$bin/overspill" forecast job.toml "${settings[@]}"

echo "== train, and stop it as Ctrl-C would"
"$bin/overspill" train job.toml --run run "${settings[@]}" --set train.steps=4000 &
pid=$!
until [ -e run/metrics.jsonl ] && [ "$(wc -l < run/metrics.jsonl)" -ge 3 ]; do kill -0 $pid; sleep 0.2; done
kill -INT $pid
code=0; wait $pid || code=$?
[ "$code" = 130 ]

echo "== go on, but only to step 40 past where it stopped"
done_steps=$(wc -l < run/metrics.jsonl)
sed -i "s/^steps = .*/steps = $((done_steps + 40))/" run/job.toml
"$bin/overspill" resume run

echo "== the model"
"$bin/overspill" export run --out model
"$bin/overspill" generate model --prompt "MACBETH" --max-new-tokens 20 --temperature 0.8
"$bin/overspill" runs show run
