#!/usr/bin/env bash
# A distilled draft model: data, training, export, measuring, report. Interrupted, it goes on where it stopped.
. "$(dirname "$0")/../lib.sh"
RUN=${RUN:-runs/draft_model$([ "$SMOKE" = 1 ] && echo -smoke || true)}

train draft_model compare_draft_model "$RUN"
bench "$RUN" "$RUN/bench" tree=chain 'trees=[{name: dynamic, top_k: 3, depth: 3, total: 8}]' hf_assisted=true limit=8 max_new_tokens=64 repeats=1
echo "report: $RUN/bench/report.html"
