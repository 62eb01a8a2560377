#!/usr/bin/env bash
# EAGLE-1: data, training, export, measuring, report. Interrupted, it goes on where it stopped.
. "$(dirname "$0")/../lib.sh"
RUN=${RUN:-runs/eagle1$([ "$SMOKE" = 1 ] && echo -smoke || true)}

train eagle1 compare_eagle1 "$RUN"
bench "$RUN" "$RUN/bench" tree=calibrated 'trees=[{name: chain, length: 3}]' limit=8 max_new_tokens=64 repeats=1
echo "report: $RUN/bench/report.html"
