#!/usr/bin/env bash
# EAGLE-2: data, training, export, measuring, report. Interrupted, it goes on where it stopped.
. "$(dirname "$0")/../lib.sh"
RUN=${RUN:-runs/eagle2$([ "$SMOKE" = 1 ] && echo -smoke || true)}

train eagle1 compare_eagle1 "$RUN"
bench "$RUN" "$RUN/bench" tree=dynamic 'trees=[{name: dynamic, top_k: 4, depth: 3, total: 8}]' limit=8 max_new_tokens=64 repeats=1
echo "report: $RUN/bench/report.html"
