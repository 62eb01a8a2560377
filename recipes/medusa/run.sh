#!/usr/bin/env bash
# MEDUSA heads: data, training, export, measuring, report. Interrupted, it goes on where it stopped.
. "$(dirname "$0")/../lib.sh"
RUN=${RUN:-runs/medusa$([ "$SMOKE" = 1 ] && echo -smoke || true)}

train medusa compare_medusa "$RUN"
bench "$RUN" "$RUN/bench" tree=calibrated 'trees=[{name: chain, length: 3}]' limit=8 max_new_tokens=64 repeats=1
echo "report: $RUN/bench/report.html"
