"""What every worker does around its engine; standard library only, since it runs in the engine's environment."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


def serve(run: Callable[[Job], dict[str, Any]]) -> None:
    """Read the job named first on the command line, run it, write the answer to the file named second."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    question, answer = map(Path, sys.argv[1:3])
    content = run(json.loads(question.read_text(encoding="utf-8")))
    fresh = answer.with_suffix(".tmp")
    fresh.write_text(json.dumps(content), encoding="utf-8")
    fresh.replace(answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines hang or crash while Python takes them apart


def _end_with_parent() -> None:
    """Whoever started us holds the other end of our standard input; it closes when that process is gone."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
