"""What an engine is: an environment, a worker that runs in it, and how our folders become what it loads."""

import tempfile
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from distill.errors import UserError
from distill.files import fresh_folder, swap_folder
from distill.target.fingerprint import folder_weights, short
from engines.environment import Environment
from engines.process import run_worker

Method = Literal["none", "eagle3", "eagle1", "medusa", "draft_model"]
Dtype = Literal["float32", "bfloat16", "float16"]

COUNTS = ("drafts", "drafted", "accepted")


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """What an engine wrote and what it counted, over all prompts together.

    Attributes:
        ids: generated ids of every prompt, up to and including the first end-of-text.
        version: of the engine.
        drafts: proposals the target verified; None where the engine does not say.
        drafted: tokens in them.
        accepted: drafted tokens that the target kept.
        accepted_per_position: proposals of which at least 1, 2, ... k tokens were kept; None where the engine does not
            say.
    """

    ids: list[list[int]]
    version: str
    drafts: int | None
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...] | None = None


class Engine(ABC):
    """An engine that decodes greedily, with or without a drafter.

    A new one is a subclass with these attributes, a worker of the same name and a line in ``ENGINES``.

    Attributes:
        environment: what is installed for it, and where.
        formats: for every method it knows, the export formats it can read.
        variables: environment variables of its worker; the user's own values go first.
        complaint: how its log tells of an error, where that says more than the exception; see ``last_words``.
    """

    environment: ClassVar[Environment]
    formats: ClassVar[Mapping[Method, tuple[str, ...]]]
    variables: ClassVar[Mapping[str, str]] = {}
    complaint: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Short name, as in ``ENGINES``."""
        return self.environment.name

    def run(
        self,
        target: Path,
        draft: Path | None,
        method: Method,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        k: int = 3,
        dtype: Dtype = "float32",
        timeout_s: float = 1800,
    ) -> EngineResult:
        """Continue every prompt greedily in the engine, in a process of its own.

        Args:
            target: a transformers folder with ``config.json`` and safetensors.
            draft: an export in one of ``formats[method]``; None with method ``none``.
            method: kind of drafter.
            prompts: token ids, each at least one long.
            max_new_tokens: generated tokens at most.
            k: tokens drafted per pass.
            dtype: of weights and arithmetic; losslessness is exact in float32 only.
            timeout_s: seconds after which the engine is stopped; converting models is not counted.

        Raises:
            UserError: not installed, a method it does not know, a folder it cannot load, a crash or the timeout.
        """
        self._check(method, draft, prompts, max_new_tokens=max_new_tokens, k=k, dtype=dtype)
        self.environment.require()
        with tempfile.TemporaryDirectory(prefix=f"draftsmith-{self.name}-") as name:
            work = Path(name)
            ready = self.prepare_target(target, dtype)
            job = {
                "target": str(ready),
                "draft": None if draft is None else str(self.prepare_draft(draft, method, ready, dtype, work)),
                "method": method,
                "prompts": [list(prompt) for prompt in prompts],
                "max_new_tokens": max_new_tokens,
                "k": k,
                "dtype": dtype,
            }
            answer = self.call(job, work, timeout_s=timeout_s)
        return self._result(answer, job)

    def prepare_target(self, target: Path, dtype: Dtype) -> Path:
        """What the engine loads as target."""
        return target

    def prepare_draft(self, draft: Path, method: Method, target: Path, dtype: Dtype, work: Path) -> Path:
        """What the engine loads as drafter.

        Args:
            draft: the export.
            method: kind of drafter.
            target: what ``prepare_target`` returned.
            dtype: of the run.
            work: a folder that is deleted after the run.
        """
        return draft

    def converted(self, target: Path, kind: str, build: Callable[[Path], None]) -> Path:
        """A folder made from the target once and kept in the user's cache.

        Args:
            target: a transformers folder.
            kind: which of several conversions.
            build: fills the empty folder it is given.
        """
        try:
            config = (target / "config.json").read_bytes()
        except OSError as error:
            raise UserError(
                f"the target must be a transformers folder with a config.json, got {target}: {error}"
            ) from error
        key = short(folder_weights(target).encode() + config)
        folder = self.environment.folder / "models" / f"{key}-{kind}"
        if not folder.is_dir():
            with fresh_folder(folder, what="converted target") as fresh:
                build(fresh)
                swap_folder(fresh, folder)
        return folder

    def call(self, job: Mapping[str, Any], work: Path, *, timeout_s: float) -> dict[str, Any]:
        """Hand a job to the worker and wait for its answer.

        Raises:
            UserError: it failed, with the last thing it said.
        """
        script = Path(__file__).parent / "workers" / f"{self.name}_worker.py"
        return run_worker(
            [str(self.environment.python), str(script)],
            job,
            name=self.name,
            work=work,
            variables=self.variables,
            timeout_s=timeout_s,
            keep_log=self.environment.folder / "last-failure.log",
            complaint=self.complaint,
        )

    def _check(
        self,
        method: Method,
        draft: Path | None,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        k: int,
        dtype: Dtype,
    ) -> None:
        if method != "none" and method not in self.formats:
            known = ", ".join(self.formats)
            raise UserError(f"engine {self.name} must be given a drafter of {known}, got {method}; use another engine")
        assert (method == "none") == (draft is None), "a drafter has a method, and a method a drafter"
        assert dtype in get_args(Dtype), dtype
        for name, value in (("max_new_tokens", max_new_tokens), ("k", k)):
            if value < 1:
                raise UserError(f"{name} must be >= 1, got {value}")
        if not prompts or not all(prompts):
            raise UserError("engines must be given prompts of at least one token each, got none or an empty one")

    def _result(self, answer: Mapping[str, Any], job: Mapping[str, Any]) -> EngineResult:
        """Check the worker's answer: an engine of another version may count under other names."""
        fault = _fault(answer, job)
        if fault:
            raise UserError(
                f"engine {self.name} must answer with ids and counters for every prompt, got {fault}; "
                f"run python -m engines setup {self.name} again"
            )
        places = answer["accepted_per_position"]
        return EngineResult(
            ids=[list(ids) for ids in answer["ids"]],
            version=str(answer["version"]),
            drafts=answer["drafts"],
            drafted=answer["drafted"],
            accepted=answer["accepted"],
            accepted_per_position=None if places is None else tuple(places),
        )


def _fault(answer: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """What is wrong with an answer; empty when nothing is."""
    missing = [name for name in ("ids", "version", "accepted_per_position", *COUNTS) if name not in answer]
    if missing:
        return f"an answer without {', '.join(missing)}"
    if len(answer["ids"]) != len(job["prompts"]):
        return f"{len(answer['ids'])} texts for {len(job['prompts'])} prompts"
    for ids in answer["ids"]:
        if not 1 <= len(ids) <= job["max_new_tokens"] or not all(type(i) is int and i >= 0 for i in ids):
            return f"a text of {len(ids)} tokens where 1 to {job['max_new_tokens']} ids were due"
    counts = [answer[name] for name in COUNTS if answer[name] is not None]
    if not all(type(count) is int and count >= 0 for count in counts) or answer["accepted"] > answer["drafted"]:
        return f"counters {dict(zip(COUNTS, (answer[name] for name in COUNTS), strict=True))}"
    if job["method"] != "none" and not answer["drafted"] and job["max_new_tokens"] > 2:
        return "no drafted token at all"
    places = answer["accepted_per_position"]
    if places is not None and sum(places) != answer["accepted"]:
        return f"{answer['accepted']} accepted tokens, but {sum(places)} over the positions"
    return ""
