#!/usr/bin/env bash
# What `make demo` shows, after set-up and assets: forecast, training with live progress, the comparison, an export,
# and an answer of the trained model. Every line is a command of the README; run them by hand to vary them.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
run=${DEMO_RUN:-runs/demo}
assets=${OVERSPILL_ASSETS:-$PWD/.cache/assets}

# Quoted so that a shown command can be pasted.
say() { printf '\n$'; printf ' %q' "$@"; printf '\n'; "$@"; }

if [ -e "$run/run.json" ]; then
  say overspill runs rm --yes "$run"
fi
say overspill train examples/demo.toml --run "$run" \
  --set "model.path=$assets/smollm2-135m-instruct" --set "data.path=$assets/shakespeare/shakespeare.txt"
say overspill export "$run" --out "$run/model"
say overspill generate "$run/model" --prompt $'ROMEO:\nWhat light is that' --max-new-tokens 60

printf '\nThe run is in %s. `overspill runs show %s` shows it again, %s/model loads in transformers.\n' "$run" "$run" "$run"
