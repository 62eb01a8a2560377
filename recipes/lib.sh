# Shared by the recipes: where things are, and stages that are skipped when their result is there.
# SMOKE=1 uses a tiny random target and a few steps: the whole recipe in under two minutes.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
SMOKE=${SMOKE:-0}

stage() { # stage RESULT COMMAND...: run the command unless its result exists
    local result=$1
    shift
    if [ -e "$result" ]; then
        echo "== $result is there"
    else
        echo "== $*"
        "$@"
    fi
}

# train NAME EXPERIMENT RUN [overrides]: EXPERIMENT, or tiny-NAME as a smoke test
train() {
    local name=$1 experiment=$2 run=$3
    shift 3
    if [ "$SMOKE" = 1 ]; then
        stage "$run/export" "$PYTHON" train.py "experiment=tiny-$name" "run_dir=$run" trainer.max_steps=8 eval.max_new_tokens=12
    else
        stage "$run/export" "$PYTHON" train.py "experiment=$experiment" "run_dir=$run" "$@"
    fi
}

# bench RUN OUT [overrides]: measure the run's drafter
bench() {
    local run=$1 out=$2
    shift 2
    if [ "$SMOKE" = 1 ]; then
        stage "$out/results.jsonl" "$PYTHON" -m serve_eval task=bench "checkpoint=$run" "out=$out" "$@" \
            limit=2 max_new_tokens=12 repeats=1 warmup=0
    else
        stage "$out/results.jsonl" "$PYTHON" -m serve_eval task=bench "checkpoint=$run" "out=$out" "$@"
    fi
}
