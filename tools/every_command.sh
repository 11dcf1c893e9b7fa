#!/usr/bin/env bash
# Calls every command of flsv once, in a folder: PYTHON=python tools/every_command.sh FOLDER
set -euo pipefail
python=$(realpath -s "${PYTHON:-python}")
rm -rf "$1"
mkdir -p "$1"
cd "$1"

flsv() {
  echo "== flsv $*"
  "$python" -m flsv "$@"
}

quiet=(--trainer.enable_progress_bar false --trainer.enable_model_summary false)
flsv data --config quickstart --out samples
flsv value --config quickstart --out valuation
flsv fit --config quickstart --trainer.max_epochs 2 "${quiet[@]}"
run=lightning_logs/version_0
for command in validate test predict; do
  flsv "$command" --config "$run/config.yaml" --ckpt_path "$run/checkpoints/last.ckpt" "${quiet[@]}"
done
flsv repeat 1 --config "$run/config.yaml" --out repeated
flsv retrain "$run" --seeds 1 --trainings singles
flsv report "$run"
flsv init project
ls "$run/contributions.csv" "$run/retrained/repeat.csv" "$run/report.html" valuation/valuation.csv
