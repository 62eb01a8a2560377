#!/usr/bin/env bash
# Every method on one target: equal data, equal training time, its best plan, two prompt sets, T = 0 and T = 1, one table.
# Interrupted, it goes on where it stopped. MINUTES is the training time of each method, LIMIT the prompts per set.
. "$(dirname "$0")/../lib.sh"
OUT=${OUT:-runs/compare$([ "$SMOKE" = 1 ] && echo -smoke || true)}
MINUTES=${MINUTES:-9}
LIMIT=${LIMIT:-6}
THREADS=${THREADS:-$(nproc)} # of every benchmark: results of different numbers cannot be joined
METHODS=${METHODS:-eagle3 eagle1 medusa hydra draft_model}
TREES='[{name: chain, length: 3}, {name: calibrated, depth: 3, top_k: 3, total: 6}, {name: dynamic, top_k: 3, depth: 3, total: 6}]'

# EAGLE-3 comes first: it writes the features of the target that the others read a part of.
for name in $METHODS; do
    train "$name" "compare_$name" "$OUT/$name" "data.folder=$OUT/data" "data.features_folder=$OUT/features" \
        "trainer.max_time=$MINUTES"
done

PROMPTS=(prompts=mtbench,humaneval "limit=$LIMIT" max_new_tokens=48 repeats=1 warmup=1 "threads=$THREADS")
results=()
for t in 0.0 1.0; do
    for name in $METHODS; do
        extra=("trees=$TREES")
        [ "$name" = draft_model ] && extra+=(hf_assisted=true)
        # What needs no training is measured once, in the first run.
        [ "$name" = eagle3 ] && extra=(hf_lookup=true "trees=${TREES%]}, {drafter: {name: prompt_lookup}, name: chain, length: 3}, {drafter: {name: early_exit, layers: 4}, name: chain, length: 1}]")
        bench "$OUT/$name" "$OUT/bench-$name-$t" "${PROMPTS[@]}" tree=chain tree.length=2 "temperature=$t" "${extra[@]}"
        results+=("$OUT/bench-$name-$t")
    done
done
"$PYTHON" -m serve_eval task=compare "results=[$(IFS=,; echo "${results[*]}")]" "out=$OUT"

# One drafter at T = 1: candidates coupled to the target's noise, beside rejection sampling and the best-scored candidates.
C='depth: 3, top_k: 3, total: 6'
COUPLING="[{name: chain, length: 3, verifier: rejection}, {name: chain, length: 3, candidates: topk}, \
{name: calibrated, $C}, {name: calibrated, $C, verifier: rejection}, {name: calibrated, $C, candidates: topk}, \
{name: dynamic, $C}, {name: dynamic, $C, candidates: topk}]"
for name in $METHODS; do
    [ "$name" = eagle3 ] || continue
    bench "$OUT/$name" "$OUT/coupling-$name" "${PROMPTS[@]}" "limit=$((2 * LIMIT))" tree=chain tree.length=3 temperature=1.0 hf=false \
        "trees=$COUPLING"
done
